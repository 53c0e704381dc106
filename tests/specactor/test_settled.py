"""Predictions for steps that verify only the drafts that have arrived, and decisions that use
them, against a simulation of batches token by token."""

from functools import cache, partial
from itertools import product
from math import sqrt

import pytest

from benchmarks.papers.drafters import LATENCY, SMALL
from engines.latency.drafting_pace import pace
from engines.latency.forecast import step_s
from engines.rollout.moves import Redraft
from engines.specactor.ladder import Ladder, token_acceptance
from engines.specactor.planner import Cluster, plan_decoupled
from engines.specactor.reconfigure import Reconfiguration
from schemas.rollout import DraftProgress, DraftSetting
from tests.specactor.expectations import coupled_tokens_per_s
from tests.specactor.latencies import AffineLatency
from tests.specactor.machine import BatchMachine
from tests.specactor.views import drafted, request, view_of

WINDOWS = (1, 2, 3, 5, 8)
ACCEPTANCES = (0.3, 0.5, 0.77, 0.95)
BATCHES = (1, 32)
SLOW, FAST = (
    AffineLatency(10e-3, 50e-6, 50e-6, {"small": (alpha, slope)})
    for alpha, slope in ((3e-3, 40e-6), (1e-3, 10e-6))
)
"""Drafters that need a third, or a tenth, of a decoding step for a token."""
NUM_TOKENS = 20_000


@cache
def machine(slow: bool, batch: int, window: int, acceptance: float) -> BatchMachine:
    latency = SLOW if slow else FAST
    verify_s = partial(step_s, latency, 1, batch, batch * 1000.0)
    draft_s = latency.draft_s("small", batch, 1)
    return BatchMachine(window, acceptance, draft_s, verify_s, batch).run(
        max(100, NUM_TOKENS // batch)
    )


def decoupled(window: int, p: float) -> tuple[DraftSetting, float]:
    return DraftSetting("small", window, coupled=False), p


GRID = list(product((True, False), BATCHES, WINDOWS, ACCEPTANCES))


def test_tokens_a_step_are_those_of_the_machine():
    off = []
    for slow, batch, window, p in GRID:
        latency, run = SLOW if slow else FAST, machine(slow, batch, window, p)
        found = pace(decoupled(window, p), run.draft_token_s, run.verify_s)
        off.append(abs(found.tokens / run.tokens_per_step - 1))
        assert found.tokens_per_s == pytest.approx(run.tokens_per_s, rel=0.03), (batch, window, p)
        assert found.step_s <= latency.verify_s(1, batch, batch * 1000.0, window)
    assert max(off) < 0.03
    assert sum(off) / len(off) < 0.01


def test_acceptance_is_measured_without_bias():
    """The window does not matter, although decoupled steps verify shorter drafts. Over all points,
    the deviations are no larger than chance allows."""
    scores = []
    for slow, batch, window, p in GRID:
        run = machine(slow, batch, window, p)
        if not run.num_drafted:
            continue
        told = DraftProgress(
            DraftSetting("small", window, coupled=False),
            run.num_drafted,
            run.num_accepted,
            run.num_rejections,
        )
        num_looked_at = run.num_accepted + run.num_rejections
        scores.append((told.acceptance - p) / sqrt(p * (1 - p) / num_looked_at))
    assert len(scores) > 40
    assert max(map(abs, scores)) < 4
    assert abs(sum(scores)) / sqrt(len(scores)) < 3


def test_the_rate_at_the_full_window_is_no_acceptance():
    """Inverting the rate at the full window gives more than the true 0.5."""
    run = machine(True, 8, 8, 0.5)
    assert token_acceptance(8, run.num_accepted / run.num_drafted) > 0.6


def test_the_step_of_specactor_s_plan():
    """At b = 321 and p = 0.77, a step verifies 1.4 tokens of a window of 3. Drafting pays."""
    context_tokens = 321 * 2048.0
    verify_s = partial(step_s, LATENCY, 4, 321, context_tokens)
    found = pace(decoupled(3, 0.77), LATENCY.draft_s(SMALL, 321, 1), verify_s)
    decode_s = LATENCY.decode_s(4, 321, context_tokens)
    assert found.num_verified == pytest.approx(1.4, abs=0.05)
    assert found.tokens_per_s * decode_s == pytest.approx(1.33, abs=0.01)
    plan = plan_decoupled(Cluster(16384, 256, (4,), 2048.0), LATENCY, SMALL, 0.77, max_window=8)
    assert (plan.drafter_gpus, plan.window) == (1, 3)


def speeds(slow: bool, batch: int, p: float) -> dict[DraftSetting, float]:
    """Return the tokens per second of each setting. The machine gives those of decoupled settings.
    Coupled steps are all alike, so a formula gives theirs."""
    latency = SLOW if slow else FAST
    found = {}
    for window in WINDOWS:
        ahead = DraftSetting("small", window, coupled=False)
        found[ahead] = machine(slow, batch, window, p).tokens_per_s
        turns_s = (
            latency.draft_s("small", batch, window),
            latency.verify_s(1, batch, batch * 1000.0, window),
        )
        found[DraftSetting("small", window)] = coupled_tokens_per_s(window, p, *turns_s)
    return found


@pytest.mark.parametrize("slow", [True, False])
def test_decisions_are_the_best_by_brute_force(slow):
    """The plan and the reconfiguration reach 98 % of the best simulated speed."""
    ladder = Ladder(SLOW if slow else FAST, 1, ("small",), 1000.0, 8)
    for batch, p in product(BATCHES, ACCEPTANCES):
        best = ladder.best_setting("small", p, batch)
        truth = speeds(slow, batch, p)
        if best not in truth:
            truth[best] = machine(slow, batch, best.window, p).tokens_per_s
        assert truth[best] >= 0.98 * max(truth.values()), (batch, p, best)
        cluster = Cluster(batch, 2, (1,), 1000.0)
        plan = plan_decoupled(cluster, ladder.latency, "small", p, max_window=8)
        ahead = {s.window: speed for s, speed in truth.items() if not s.coupled}
        planned = machine(slow, batch, plan.window, p).tokens_per_s
        assert planned >= 0.98 * max(ahead.values()), (batch, p, plan)


def test_request_above_mean_acceptance_drafts_further():
    """But not as far as a request that is alone."""
    ladder = Ladder(SLOW, 1, ("small",), 1000.0, 16)
    narrow = DraftSetting("small", 2, coupled=False)
    many = {0: {i: drafted(0.95 if i else 0.5, narrow) for i in range(200)}}
    policy = Reconfiguration(ladder, coupled=False)
    policy.decide(view_of(many, 0))
    found = {move.id: move for move in policy.decide(view_of(many, 1000))}
    window = found[request(1)].drafting.window
    assert isinstance(found[request(1)], Redraft)
    assert window > 2
    alone = {0: {0: drafted(0.95, narrow)}}
    policy.decide(view_of(alone, 2000))
    (move,) = policy.decide(view_of(alone, 3000))
    assert move.drafting == ladder.best_setting("small", 0.95, 1, 3000.0)
