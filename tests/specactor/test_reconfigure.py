"""Algorithm 2 chooses the window of each request every thousand tokens, or no drafts."""

import timeit
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.latency.drafting_pace import pace
from refrain.engines.latency.forecast import step_s
from refrain.engines.rollout.moves import Redraft
from refrain.engines.specactor.ladder import NEAR, Ladder
from refrain.engines.specactor.reconfigure import LEAST_GAIN, NO_DRAFTS, Reconfiguration
from refrain.schemas.rollout import DraftSetting
from tests.specactor.latencies import AffineLatency, affine_latencies
from tests.specactor.views import SMALL, drafted, request, view_of

LADDER = Ladder(AffineLatency(), 4, ("small",), 1000.0, 8, {"small": 1})
MIXED = {0: drafted(0.2), 1: drafted(0.7), 2: drafted(0.8)}


def policy(ladder=LADDER) -> Reconfiguration:
    return Reconfiguration(ladder)


def ahead(window: int) -> DraftSetting:
    return DraftSetting("small", window, coupled=False)


def speed(ladder, setting, p, *at) -> float:
    return ladder.pace(setting, p, *at).tokens_per_s


def turns(policy, engines, *num_tokens) -> list[list[Redraft]]:
    return [policy.decide(view_of(engines, num)) for num in num_tokens]


def test_everybody_each_thousand_tokens():
    engines = {0: MIXED, 1: {3: drafted(0.05)}}
    moves = turns(policy(), engines, 0, 999, 1000, 1999, 2000)
    assert [len(at) for at in moves] == [0, 0, len(moves[2]), 0, len(moves[2])]
    assert {(move.id, move.engine) for move in moves[2]} > {(request(0), 0), (request(3), 1)}


def test_the_choice_is_the_best_for_the_engine_s_batch_and_context():
    decider = Reconfiguration(LADDER, prompt_tokens=500.0)
    moves = {move.id: move.drafting for move in turns(decider, {0: MIXED}, 0, 1000)[-1]}
    assert moves[request(2)] == LADDER.best_setting("small", 0.8, 3, 1500.0)


def test_request_below_mean_acceptance_keeps_the_mean_window():
    """With a shorter window it would end later, and the others of its engine would end before
    it."""
    slow, mean = (LADDER.best_setting("small", p, 3, 1000.0) for p in (0.2, 0.57))
    assert slow.window < mean.window
    moves = {move.id: move.drafting for move in turns(policy(), {0: MIXED}, 0, 1000)[-1]}
    assert moves[request(0)] == mean
    alone = {0: {0: drafted(0.2)}}
    (move,) = turns(policy(), alone, 0, 1000)[-1]
    assert move.drafting == LADDER.best_setting("small", 0.2, 1, 1000.0)


def test_best_setting_is_not_changed():
    alike = dict.fromkeys(range(2), 0.3)
    best = LADDER.best_setting("small", 0.3, 2, 1000.0)
    assert turns(policy(), {0: {i: drafted(p, best) for i, p in alike.items()}}, 0, 1000)[-1] == []
    worse = {0: {i: drafted(p, ahead(1)) for i, p in alike.items()}}
    assert [move.drafting for move in turns(policy(), worse, 0, 1000)[-1]] == [best, best]


def test_small_gains_change_no_setting():
    """The settings differ in speed by less than a change is worth."""
    p, at = 0.5, (1, 1000.0)
    best = LADDER.best_setting("small", p, *at)
    near = [
        setting
        for w in range(1, 9)
        if (setting := replace(best, window=w)) != best
        and speed(LADDER, best, p, *at) < LEAST_GAIN * speed(LADDER, setting, p, *at)
    ]
    assert near
    for setting in near:
        assert turns(policy(), {0: {0: drafted(p, setting)}}, 0, 1000)[-1] == []


def test_a_copy_s_turns_begin_where_it_came_in():
    decider = policy()
    turns(decider, {0: MIXED}, 0, 4000)
    raced = {0: MIXED, 1: {0: drafted(0.1)}}
    assert [move.engine for move in turns(decider, raced, 4500)[0]] == []
    moves = turns(decider, raced, 5500)[0]
    assert sorted(move.engine for move in moves if move.id == request(0)) == [0, 1]


def test_a_conversation_that_begins_anew_has_its_turns_sooner():
    """Otherwise it would wait until it is as long as it was, and a thousand tokens longer."""
    decider, engines = policy(), {0: MIXED}
    again = turns(decider, engines, 0, 4000, 10, 1010)
    assert again[3] == turns(policy(), engines, 0, 1010)[1] != []


@pytest.mark.parametrize("told", [None, drafted(None), drafted(0.1, None)])
def test_of_whom_nothing_is_known_nothing_is_decided(told):
    decided = turns(policy(), {0: {**MIXED, 0: told}}, 0, 1000)[-1]
    assert request(0) not in {move.id for move in decided}


COSTLY = replace(LADDER, latency=AffineLatency(20e-3, 3e-4, 3e-4))
"""Verifying a draft token takes as long as decoding one, so drafts pay in small batches only."""


def test_no_drafts_is_an_answer():
    """The request is left to the history drafter until its batch is small enough. Its acceptance
    is the last one known, because nothing is measured meanwhile."""
    big = {0: {i: drafted(0.3, ahead(4)) for i in range(200)}}
    left = {0: dict.fromkeys(range(200))}
    decider = policy(COSTLY)
    moves = turns(decider, big, 0, 1000)[-1]
    assert {move.drafting for move in moves} == {NO_DRAFTS}
    assert len(moves) == 200
    assert turns(decider, left, 2000)[-1] == [], "must stay as it is"
    lagging = {0: {i: drafted(0.3, NO_DRAFTS) for i in range(200)}}
    assert turns(decider, lagging, 3000)[-1] == []
    (move,) = turns(decider, {0: {7: None}}, 4000)[-1]
    assert move.drafting == COSTLY.best_setting("small", 0.3, 1, 4000.0)
    assert turns(policy(COSTLY), left, 0, 1000)[-1] == [], "never had a drafter"


@settings(deadline=None, max_examples=40)
@given(affine_latencies, st.floats(0, 1), st.integers(1, 200))
def test_no_setting_is_faster(latency, p, batch):
    ladder = Ladder(latency, 4, ("small",), 1000.0, 6, {"small": 1})
    best = ladder.best_setting("small", p, batch)
    v, d = partial(step_s, latency, 4, batch, 1000.0 * batch), latency.draft_s("small", batch, 1)
    speeds = {ahead(w): pace((ahead(w), p), batch, d, v).tokens_per_s for w in range(1, 7)}
    found = speed(ladder, best, p, batch)
    assert found == pytest.approx(speeds[best])
    assert found * (1 + NEAR) >= max(speeds.values()) * 0.99
    shorter = [setting for setting in speeds if setting.window < best.window]
    assert all(speeds[s] * (1 + NEAR) < found * (1 + NEAR + 1e-9) for s in shorter)


def test_ended_requests_are_forgotten():
    decider = policy()
    turns(decider, {0: MIXED}, 0)
    turns(decider, {0: {5: drafted(0.5)}}, 10)
    assert list(decider._turns[0]) == [request(5)]


def test_a_decision_is_quick():
    """One of 64 engines has changed. Each has 256 requests, and none is due for a decision. A
    simulation decides 320,000 times like this."""
    decider = policy()
    view = view_of({e: {256 * e + i: drafted(0.5, SMALL) for i in range(256)} for e in range(64)})
    decider.decide(view)
    engines = list(view.engines)

    def once():
        engines[3] = replace(engines[3])
        decider.decide(replace(view, engines=tuple(engines)))

    assert min(timeit.repeat(once, number=5, repeat=5)) / 5 < 2e-3
