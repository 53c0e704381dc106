"""Speeds and decisions against the shipped protocol, token by token (`tests.specactor.machine`)."""

import random
from functools import cache, partial
from itertools import product
from math import sqrt

import pytest

from refrain.benchmarks.papers.drafters import LATENCY, SMALL
from refrain.engines.latency.forecast import step_s
from refrain.engines.rollout.moves import Redraft
from refrain.engines.specactor.ladder import NEAR, Ladder, choose_drafter
from refrain.engines.specactor.planner import Cluster, split_gpus
from refrain.engines.specactor.reconfigure import Reconfiguration
from refrain.schemas.drafting import HISTORY, NGRAM
from refrain.schemas.rollout import DraftProgress, DraftSetting
from tests.specactor.latencies import AffineLatency
from tests.specactor.machine import Machine
from tests.specactor.views import drafted, request, view_of

WINDOWS = (2, 3, 5, 8)
ACCEPTANCES = (0.5, 0.77, 0.95)
BATCHES = (1, 32)
SLOW, FAST = (
    AffineLatency(
        10e-3, 50e-6, 50e-6, {"small": (alpha, slope), NGRAM: (0.0, 1e-6), HISTORY: (0.0, 1e-6)}
    )
    for alpha, slope in ((3e-3, 40e-6), (1e-3, 10e-6))
)
"""Drafters that need a third, or a tenth, of a decoding step for a token."""
NUM_TOKENS = 2_000
CONTEXT = 1000.0


def ladder(latency: AffineLatency, shared_by: int = 1) -> Ladder:
    return Ladder(latency, 1, ("small", NGRAM, HISTORY), CONTEXT, 8, {"small": shared_by})


@cache
def machine(slow: bool, batch: int, window: int, acceptance: float, engines: int = 1) -> Machine:
    latency = SLOW if slow else FAST
    verify_s = partial(step_s, latency, 1, batch, batch * CONTEXT)

    def draft_s(num: int) -> float:
        return latency.draft_s("small", num, 1)

    run = Machine(window, acceptance, draft_s, verify_s, batch, engines)
    return run.run(max(60, NUM_TOKENS // batch))


GRID = list(product((True, False), BATCHES, WINDOWS, ACCEPTANCES))


def test_speeds_ahead_are_those_of_the_machine():
    off = []
    for slow, batch, window, p in GRID:
        latency, run = SLOW if slow else FAST, machine(slow, batch, window, p)
        found = ladder(latency).pace(DraftSetting("small", window, coupled=False), p, batch)
        off.append(found.tokens_per_s / run.tokens_per_s - 1)
        assert abs(off[-1]) < 0.03, (slow, batch, window, p, off[-1])
        assert found.step_s <= latency.verify_s(1, batch, batch * CONTEXT, window)
    assert sum(map(abs, off)) / len(off) < 0.01


@pytest.mark.parametrize(("window", "p"), [(4, 0.77), (5, 0.95)])
def test_engines_that_share_a_drafter(window, p):
    run = machine(True, 16, window, p, engines=3)
    shared = ladder(SLOW, shared_by=3)
    setting = shared.setting("small", window)
    found = shared.pace(setting, p, 16)
    assert found.tokens_per_s == pytest.approx(run.tokens_per_s, rel=0.03)
    assert found.tokens_per_s < 0.99 * ladder(SLOW).pace(setting, p, 16).tokens_per_s


def in_turn(latency: AffineLatency, drafter: str, batch: int, window: int, p: float) -> float:
    """Return tokens per second of a request whose engine drafts between its steps, token by
    token."""
    rng, num_steps, num_tokens = random.Random(window), 6000, 0
    for _ in range(num_steps):
        num_tokens += 1 + next((a for a in range(window) if rng.random() >= p), window)
    verify_s = latency.verify_s(1, batch, batch * CONTEXT, window)
    return num_tokens / num_steps / (latency.draft_s(drafter, batch, window) + verify_s)


@pytest.mark.parametrize("drafter", [NGRAM, HISTORY])
def test_speeds_in_the_engine_are_those_of_the_machine(drafter):
    on = ladder(SLOW)
    for batch, window, p in product(BATCHES, (1, 4, 8), (0.3, 0.95)):
        found = on.pace(on.setting(drafter, window), p, batch).tokens_per_s
        assert found == pytest.approx(in_turn(SLOW, drafter, batch, window, p), rel=0.03)


def test_acceptance_is_measured_without_bias():
    """The window does not matter, although steps verify shorter drafts. Over all points, the
    deviations are no larger than chance allows."""
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
    assert len(scores) > 30
    assert max(map(abs, scores)) < 4
    assert abs(sum(scores)) / sqrt(len(scores)) < 3


def test_drafting_ahead_pays_where_taking_turns_does_not():
    """At a batch of 322 and with 1.4 of the draft times, 0.65 of the tokens are accepted."""

    class Dear:
        decode_s, verify_s = LATENCY.decode_s, LATENCY.verify_s

        @staticmethod
        def draft_s(drafter, batch, window):
            return 1.4 * LATENCY.draft_s(drafter, batch, window)

    waiting = Ladder(Dear(), 4, (SMALL,), 2048.0, 16)
    streaming = Ladder(Dear(), 4, (SMALL,), 2048.0, 16, {SMALL: 1})
    assert waiting.best(SMALL, 0.65, 322) == (0, 1.0)
    assert streaming.best(SMALL, 0.65, 322).speedup == pytest.approx(1.17, abs=0.01)
    assert choose_drafter(waiting, {SMALL: 0.65}, 322) is None
    chosen = choose_drafter(streaming, {SMALL: 0.65}, 322)
    assert chosen is not None
    assert not chosen.coupled


def speeds(slow: bool, batch: int, p: float) -> dict[DraftSetting | None, float]:
    """Return the tokens per second of each choice by the machine. N-grams are right half as
    often."""
    latency = SLOW if slow else FAST
    found: dict[DraftSetting | None, float] = {None: 1.0 / latency.decode_s(1, batch, 0)}
    for window in WINDOWS:
        ahead = DraftSetting("small", window, coupled=False)
        found[ahead] = machine(slow, batch, window, p).tokens_per_s
        text = DraftSetting(NGRAM, window)
        found[text] = in_turn(latency, NGRAM, batch, window, p / 2)
    return found


@pytest.mark.parametrize("slow", [True, False])
def test_decisions_are_the_best_by_brute_force(slow):
    """The choice of drafter and window and the plan reach 98 % of the best speed of the machine.
    The window of a request does so but for what `NEAR` gives away for a shorter one."""
    latency = SLOW if slow else FAST
    on = ladder(latency)
    for batch, p in product(BATCHES, ACCEPTANCES):
        truth = speeds(slow, batch, p)

        def speed_of(setting, truth=truth, batch=batch, p=p):
            if setting in truth:
                return truth[setting]
            if setting.coupled:
                return in_turn(latency, NGRAM, batch, setting.window, p / 2)
            return machine(slow, batch, setting.window, p).tokens_per_s

        at = (batch, p)
        chosen = choose_drafter(on, {"small": p, NGRAM: p / 2}, batch)
        assert speed_of(chosen) >= 0.98 * max(truth.values()), (at, chosen)
        ahead = {s: speed for s, speed in truth.items() if s and not s.coupled}
        best = on.best_setting("small", p, batch)
        assert speed_of(best) >= (0.98 - NEAR) * max(ahead.values()), (at, best)
        plan = split_gpus(Cluster(batch, 2, 1, CONTEXT, 64, 64), latency, "small", p, max_window=8)
        planned = speed_of(DraftSetting("small", plan.window, coupled=False))
        assert planned >= 0.98 * max(ahead.values()), (at, plan)


def test_request_above_mean_acceptance_drafts_further():
    """But not as far as a request that is alone."""
    on = Ladder(SLOW, 1, ("small",), CONTEXT, 16, {"small": 1})
    narrow = DraftSetting("small", 2, coupled=False)
    many = {0: {i: drafted(0.95 if i else 0.5, narrow) for i in range(200)}}
    policy = Reconfiguration(on)
    policy.decide(view_of(many, 0))
    found = {move.id: move for move in policy.decide(view_of(many, 1000))}
    assert isinstance(found[request(1)], Redraft)
    assert found[request(1)].drafting.window > 2
    alone = {0: {0: drafted(0.95, narrow)}}
    policy.decide(view_of(alone, 2000))
    (move,) = policy.decide(view_of(alone, 3000))
    assert move.drafting == on.best_setting("small", 0.95, 1, 3000.0)
