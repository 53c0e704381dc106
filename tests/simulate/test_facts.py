"""The baseline facts that the papers print, on virtual engines with the papers' settings."""

import numpy as np
import pytest

from engines.simulate.cluster import PolicySet, compare, summarise
from engines.simulate.generate import K, generate, pat, pat_runaway, rhymerl, specactor
from schemas.simulate import ClusterLayout
from tests.simulate.latencies import PAT_A40_TP2, RHYMERL_14B_TP2, SPECACTOR_32B_TP4

PAT_LAYOUT = ClusterLayout(num_engines=4, tp_degree=2, num_gpus=8)


def baseline(trace, layout, latency):
    results = compare(trace, layout, latency, [PolicySet()])
    return results, summarise(results)[0]


@pytest.mark.parametrize("max_k", [6, 8, 12, 16])
def test_pat_a_single_sample_is_left_for_46_to_82_percent(max_k):
    steps, _ = baseline(generate(pat_runaway(max_k * K), 1, range(1, 13)), PAT_LAYOUT, PAT_A40_TP2)
    assert 0.46 <= np.mean([step.last_alone_share for step in steps]) <= 0.82


def test_pat_but_not_with_its_printed_lengths():
    """The contradiction described at `pat_runaway`: figure 3b does not give figure 3a's share."""
    steps, _ = baseline(generate(pat(16 * K), 1, range(1, 13)), PAT_LAYOUT, PAT_A40_TP2)
    assert np.mean([step.last_alone_share for step in steps]) < 0.1


@pytest.mark.parametrize("seed", [0, 1])
def test_rhymerl_gpus_idle_for_over_46_percent(seed):
    """Over the 80 steps of its evaluation (section 7), 16K; the first GPU to finish waits for
    three quarters of a step (3.1: 76 %)."""
    trace = generate(rhymerl(16 * K), seed, (20, 40, 60, 80))
    layout = ClusterLayout(num_engines=64, tp_degree=2, num_gpus=128)
    steps, whole = baseline(trace, layout, RHYMERL_14B_TP2)
    assert whole.idle_share > 0.46
    assert np.mean([max(step.idle_shares) for step in steps]) > 0.7


@pytest.mark.parametrize("seed", [0, 1])
def test_specactor_gpus_idle_for_about_half(seed):
    trace = generate(specactor(), seed, (1, 67, 133, 200))
    layout = ClusterLayout(num_engines=64, tp_degree=4, num_gpus=256)
    _, whole = baseline(trace, layout, SPECACTOR_32B_TP4)
    assert 0.44 < whole.idle_share < 0.56
