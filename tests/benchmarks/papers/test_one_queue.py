"""A step's samples in one queue, in small simulated pipelines."""

import pytest

from refrain.benchmarks.papers.one_queue import KnownLengths, as_groups, queued
from refrain.benchmarks.papers.pipeline import Configuration, simulate_pipeline
from refrain.benchmarks.papers.rhymerl import dealt
from tests.benchmarks.papers.test_pipeline import EIGHT, LATENCY, small_script

TRAIN_S = 5.0


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_samples_are_as_stale_as_the_number_says(staleness):
    way = queued("q", dealt, EIGHT, LATENCY, staleness=staleness, train_s=TRAIN_S)
    found = simulate_pipeline(small_script(0), EIGHT, LATENCY, way, train_s=TRAIN_S)
    assert found.largest_staleness == staleness
    assert found.mean_staleness == staleness


def test_the_queue_is_faster_than_prompts_dealt_and_a_longer_staleness_faster_still():
    script = small_script(1)
    plain = Configuration(name="x", plan=dealt)
    before = simulate_pipeline(script, EIGHT, LATENCY, plain, train_s=TRAIN_S).samples_per_s
    for staleness in (1, 2):
        way = queued("q", dealt, EIGHT, LATENCY, staleness=staleness, train_s=TRAIN_S)
        rate = simulate_pipeline(script, EIGHT, LATENCY, way, train_s=TRAIN_S).samples_per_s
        assert rate > before
        before = rate


def test_in_hindsight_the_queue_knows_every_length_and_is_faster():
    script, known = small_script(1), as_groups(small_script(1))
    assert sorted(known.lengths.values()) == sorted(script.lengths.values())
    for step in known.steps:
        lengths = KnownLengths(step)
        for key, (request,) in step.requests.items():
            num_tokens = known.lengths[request.id]
            assert lengths.tokens(key) == num_tokens
            assert lengths.most_remaining(key, num_tokens - 1) == 1

    def rate(of, **known):
        way = queued("q", dealt, EIGHT, LATENCY, staleness=1, train_s=TRAIN_S, **known)
        return simulate_pipeline(of, EIGHT, LATENCY, way, train_s=TRAIN_S).samples_per_s

    forecast, hindsight = rate(script), rate(known, lengths=KnownLengths)
    assert forecast < hindsight < 1.3 * forecast
