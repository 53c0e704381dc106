"""Virtual engines with the papers' settings reproduce the baseline facts that the papers print."""

import numpy as np
import pytest

from refrain.benchmarks.papers.generate import generate
from refrain.benchmarks.papers.settings import SETTINGS
from refrain.engines.simulate.cluster import PolicySet, summarise
from tests.simulate.comparing import compare

(PAT,) = SETTINGS["pat"]
(RHYMERL,) = SETTINGS["rhymerl"]
(SPECACTOR,) = SETTINGS["specactor"]


def baseline(setting, seed):
    trace = generate(setting.spec, seed, setting.steps)
    results = compare(trace, setting.layout, setting.latency, [PolicySet()])
    return results, summarise(results)[0]


def test_pat_printed_lengths_contradict_the_share_that_one_sample_runs_alone():
    """Figure 3b does not give figure 3a's 46 to 82 %."""
    assert baseline(PAT, 1)[1].last_alone_share < 0.1


def test_rhymerl_gpus_idle_for_over_46_percent():
    """The first GPU to finish waits for three quarters of a step (3.1: 76 %)."""
    steps, whole = baseline(RHYMERL, 0)
    assert whole.idle_share > 0.46
    assert np.mean([max(step.idle_shares) for step in steps]) > 0.7


@pytest.mark.slow
def test_specactor_gpus_idle_for_about_half():
    _, whole = baseline(SPECACTOR, 0)
    assert 0.44 < whole.idle_share < 0.56


def test_a_setting_knows_the_epoch_before():
    trace = RHYMERL.trace(0, (20,))
    assert trace.steps == (*range(1, 17), 20)
    prompts = set(trace.step(20).table["prompt_key"].to_pylist())
    assert prompts <= set(trace.history(20))
    assert RHYMERL.trace(0, (3,)).steps == (3,)


@pytest.mark.parametrize("setting", [s for several in SETTINGS.values() for s in several])
def test_missing_drafting_costs_are_refused(setting):
    with pytest.raises(ValueError, match="leave the drafter out"):
        setting.latency.draft_s("ngram", 1, 4)
    if setting is RHYMERL:
        return
    with pytest.raises(ValueError, match="leave the drafter out"):
        setting.latency.verify_s(1, 1, 1.0, 4)
    with pytest.raises(ValueError, match="leave the drafter out"):
        setting.latency.draft_s("histospec", 1, 4)


def test_rhymerl_verifying_is_more_computation_and_no_more_memory_traffic():
    latency = RHYMERL.latency
    plain_s = latency.decode_s(2, 10, 5000.0)
    assert latency.verify_s(2, 10, 5000.0, 0) == plain_s
    assert latency.verify_s(2, 10, 5000.0, 3) == pytest.approx(
        plain_s + 30 * (latency.decode_s(2, 11, 5000.0) - plain_s)
    )
    assert 0.0 < latency.draft_s("histospec", 10, 3) < 1e-5
