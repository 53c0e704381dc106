"""The lower bound on seconds of any schedule: cases by hand, and simulated schedules."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.papers.bound import (
    PACES,
    WINDOWS,
    KnownDrafter,
    VerifierCosts,
    bound_rollout,
)
from benchmarks.papers.settings import SETTINGS
from benchmarks.papers.specactor import BASELINE, PARTS, RANKED, variants
from benchmarks.papers.speculation_case import Case
from engines.latency.expectation import streamed_step
from schemas.simulate import ClusterLayout
from tests.specactor.expectations import coupled_tokens_per_s

COSTS = VerifierCosts(step_s=0.01, sequence_s=1e-4, token_s=0.0)
(SETTING,) = SETTINGS["specactor"]
SPEC = SETTING.spec.model_copy(
    update={"num_prompts": 64, "prompts_per_step": 16, "group_size": 10, "num_steps": 8}
)


def alike(num: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(num, 100), np.full(num, tokens)


def drafter(draft_s: float, *acceptance: float) -> KnownDrafter:
    return KnownDrafter(draft_s, np.array(acceptance))


def test_bound_of_one_response_is_its_steps():
    bound = bound_rollout(COSTS, *alike(1, 500), [], num_engines=3)
    assert bound.alone_s == bound.seconds == pytest.approx(500 * 0.0101)
    assert bound.work_s == pytest.approx(500 * 1e-4 / 3)


def test_responses_that_are_alike_are_best_divided_evenly():
    """Here the bound is reached: 4 engines with 50 responses each, all equally long."""
    bound = bound_rollout(COSTS, *alike(200, 500), [], num_engines=4)
    assert bound.seconds == pytest.approx(500 * (0.01 + 50 * 1e-4), rel=0.01)
    assert bound.seconds > 1.4 * max(bound.alone_s, bound.work_s)


def test_the_context_is_read_at_every_token():
    costs = VerifierCosts(0.01, 1e-9, 1e-6)
    bound = bound_rollout(costs, *alike(1, 10_000), [], num_engines=1)
    assert bound.alone_s == pytest.approx(10_000 * (0.01 + (100 + 5_000) * 1e-6), rel=0.01)


@pytest.mark.parametrize("p", [0.5, 0.8, 0.95])
def test_no_drafter_setting_beats_the_single_response_bound(p):
    """Coupled drafting, and drafting at the same time as verification, at every pace."""
    draft_s = 3e-3
    bound = bound_rollout(COSTS, *alike(1, 1000), [drafter(draft_s, p)], num_engines=1)
    speeds = []
    for w in WINDOWS:
        verify_s = 0.0101 + 1e-4 * w
        speeds.append(coupled_tokens_per_s(w, p, w * draft_s, verify_s))
        step_s = 0.0101 + 1e-4 * streamed_step(w, p, 0.0101 / draft_s).num_verified
        speeds.append(streamed_step(w, p, step_s / draft_s).tokens / step_s)
    assert bound.alone_s <= 1000 / max(speeds) * 1.001
    assert bound.alone_s > 0.85 * 1000 / max(speeds)


def test_the_best_drafter_counts_and_one_that_is_never_right_does_not():
    drafters = [drafter(2e-3, 0.9, 0.0), drafter(2e-3, 0.0, 0.9)]
    of = alike(2, 500)
    both = bound_rollout(COSTS, *of, drafters, 2).alone_s
    assert bound_rollout(COSTS, *of, drafters[:1], 2).alone_s == pytest.approx(500 * 0.0101)
    assert both < 0.6 * 500 * 0.0101
    assert bound_rollout(COSTS, *of, [], 2).alone_s == pytest.approx(500 * 0.0101)


@pytest.fixture(scope="module")
def case():
    return Case.draw(SPEC, ClusterLayout(num_engines=5, tp_degree=4), 8, 0)


def test_nothing_that_is_simulated_is_faster(case):
    bound = case.bound()
    names = (BASELINE, PARTS[-1], f"{RANKED}, {PARTS[-1]}", "coupled, by batch, best-of-N")
    seconds = [case.simulate(v).step.step_s for v in variants(case) if v.name in names]
    assert len(seconds) == 4
    assert bound.seconds < min(seconds)
    assert bound.alone_s > 0.3 * min(seconds), "the bound is too loose to show anything"


def test_drafts_that_are_right_more_often_lower_the_bound(case):
    certain = {id: dict.fromkeys(own, 0.99) for id, own in case.acceptances.items()}
    better = replace(case, acceptances=certain)
    assert better.bound().alone_s < 0.7 * case.bound().alone_s


def test_paces_reach_as_far_as_windows_do():
    assert PACES[-1] == pytest.approx(2 * max(WINDOWS))
