"""AReaL in virtual time: how much is drawn, how stale samples get, the cost of an interruption."""

from collections import Counter

import pytest

from refrain.benchmarks.papers.areal import (
    Asynchronous,
    measured_steps,
    run_asynchronous,
    simulate_asynchronous,
)
from refrain.benchmarks.papers.pipeline import simulate_pipeline
from refrain.benchmarks.papers.rhymerl import on_policy
from tests.benchmarks.papers.test_pipeline import EIGHT, LATENCY, TWO, script_of, small_script
from tests.simulate.latencies import LinearLatency

DEAR_PREFILL = LinearLatency(1.0, prefill_step_s=5.0)
"""Every token takes 1 s. The token after a prefill takes 5 s."""
ONE_LONG = [{"a": 60, "b": 3}, *[{"a": 3, "b": 4}] * 9]


def way(eta, **options):
    return Asynchronous(name="x", staleness=eta, **options)


def samples(run):
    return [sample for batch in run.batches for sample in batch]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("train_s", [0.0, 20.0])
def test_without_staleness_it_is_on_policy(train_s, kept):
    script, times = small_script(0), {"train_s": train_s, "sync_s": 0.5}
    run = run_asynchronous(script, EIGHT, LATENCY, way(0, keeps_bound=kept), **times)
    steps = simulate_pipeline(script, EIGHT, LATENCY, on_policy(apart=True), **times).steps
    assert run.taken_s == pytest.approx([step.finished_s for step in steps])
    assert {sample.staleness for sample in samples(run)} == {0}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("eta", [0, 1, 4])
@pytest.mark.parametrize("seed", range(2))
def test_every_sample_is_trained_on_once_in_its_length(seed, eta, kept):
    script = small_script(seed)
    run = run_asynchronous(script, EIGHT, LATENCY, way(eta, keeps_bound=kept), train_s=5.0)
    assert {len(batch) for batch in run.batches} == {64}
    assert len(run.batches) == len(script.steps)
    found = Counter(
        (s.rollout.request.id, len(s.rollout.generated.token_ids)) for s in samples(run)
    )
    assert found == Counter(script.lengths.items())


@pytest.mark.parametrize("eta", [0, 1, 2, 4])
def test_no_more_are_drawn_than_the_bound_lets(eta):
    """Equation 3 of the paper allows no more. Without staleness all that it allows are drawn."""
    run = run_asynchronous(small_script(0), EIGHT, LATENCY, way(eta), train_s=5.0)
    assert all(drawn <= 64 * (i + eta + 1) for i, drawn in enumerate(run.most_drawn))
    if eta == 0:
        assert run.most_drawn == [64 * (i + 1) for i in range(7)]


@pytest.mark.parametrize("eta", [0, 1, 2])
def test_the_bound_on_age_is_kept_where_it_is_asked_for(eta):
    script = small_script(0, 9)
    kept = run_asynchronous(script, EIGHT, LATENCY, way(eta, keeps_bound=True), train_s=5.0)
    assert max(sample.staleness for sample in samples(kept)) == eta


def test_a_long_sample_outlives_the_bound_on_what_is_drawn():
    (run, kept) = (
        run_asynchronous(script_of(ONE_LONG), TWO, DEAR_PREFILL, way(1, keeps_bound=keeps))
        for keeps in (False, True)
    )
    oldest = max(samples(run), key=lambda sample: sample.staleness)
    assert len(oldest.rollout.generated.token_ids) == 60
    assert oldest.staleness > 1
    assert max(sample.staleness for sample in samples(kept)) == 1


def test_interruption_costs_a_prefill_of_running_requests():
    """Each version, the first one too, needs a prefill: its token takes 5 s in place of 1 s."""
    run = run_asynchronous(script_of(ONE_LONG), TWO, DEAR_PREFILL, way(4))
    (long,) = (s.rollout for s in samples(run) if len(s.rollout.generated.token_ids) == 60)
    num_versions = len(long.generated.spans)
    assert num_versions > 2
    assert long.finished_s == pytest.approx(60 + 4 * num_versions)


def test_the_oldest_are_trained_on_first():
    run = run_asynchronous(small_script(0), EIGHT, LATENCY, way(2), train_s=5.0)
    for batch in run.batches:
        begun = [sample.version - sample.staleness for sample in batch]
        assert begun == sorted(begun)


def simulated(seed, eta=1):
    script = small_script(seed, 7)
    longer = small_script(seed, 12)
    return simulate_asynchronous(
        longer, EIGHT, LATENCY, way(eta), measured=measured_steps(script), train_s=5.0
    )


def test_measured_rate_counts_tokens_of_the_window():
    found = simulated(0)
    assert found.measured == (11, 12, 13)
    assert found.tokens_per_s * found.seconds == sum(s.num_tokens for s in found.of_window)
    assert sum(step.num_rollouts for step in found.of_window) == 3 * 64
    whole = run_asynchronous(small_script(0, 12), EIGHT, LATENCY, way(1), train_s=5.0)
    tokens = sum(len(s.rollout.generated.token_ids) for s in samples(whole))
    # Approximately: at the start all samples are short, and at the end few are left.
    assert found.tokens_per_s == pytest.approx(tokens / whole.taken_s[-1], rel=0.4)


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="3 steps are too few: all are drawn before version 3"):
        simulate_asynchronous(small_script(0, 3), EIGHT, LATENCY, way(4), measured=(9,))
