"""Algorithm 2: window and mode of requests below the mean, every thousand tokens."""

import timeit
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.rollout.moves import Redraft
from engines.specactor.expectation import coupled_tokens_per_s, streamed_tokens_per_s
from engines.specactor.ladder import Ladder, acceptance_rate, request_acceptance
from engines.specactor.reconfigure import Reconfiguration, RequestModel
from schemas.rollout import DraftSetting
from tests.specactor.latencies import AffineLatency, affine_latencies
from tests.specactor.views import SMALL, drafted, request, view_of

MODEL = RequestModel(Ladder(AffineLatency(), 4, ("small",), 1000.0, 8), coupled=False)
MIXED = {0: drafted(0.2), 1: drafted(0.7), 2: drafted(0.8)}


def policy(model=MODEL) -> Reconfiguration:
    return Reconfiguration(model)


def turns(policy, engines, *num_tokens) -> list[list[Redraft]]:
    return [policy.decide(view_of(engines, num)) for num in num_tokens]


def test_below_the_mean_each_thousand_tokens():
    engines = {0: MIXED, 1: {3: drafted(0.75)}}
    moves = turns(policy(), engines, 0, 999, 1000, 1999, 2000)
    assert [[move.id for move in at] for at in moves] == [[], [], [request(0)], [], [request(0)]]
    assert {move.engine for at in moves for move in at} == {0}


def test_the_choice_is_the_fastest_of_both_modes():
    (move,) = turns(policy(), {0: MIXED}, 0, 1000)[-1]
    p = round(request_acceptance(MIXED[0]), 2)
    assert move.drafting == MODEL.best_setting("small", p)


def test_who_has_what_is_best_is_left_alone():
    best = MODEL.best_setting("small", 0.3)
    engines = {0: {0: drafted(acceptance_rate(best.window, 0.3), best), 1: drafted(0.8)}}
    assert turns(policy(), engines, 0, 1000)[-1] == []
    worse = {0: {**engines[0], 0: drafted(acceptance_rate(8, 0.3), DraftSetting("small", 8))}}
    assert turns(policy(), worse, 0, 1000)[-1] == [Redraft(request(0), 0, best)]


def test_a_turn_above_the_mean_is_a_turn():
    """It fell below the mean at 1500 tokens; its next turn is at 2000."""
    decider = policy()
    turns(decider, {0: {0: drafted(0.9), 1: drafted(0.1)}}, 0, 1000)
    swapped = {0: {0: drafted(0.1), 1: drafted(0.9)}}
    assert turns(decider, swapped, 1500) == [[]]
    assert [move.id for move in turns(decider, swapped, 2000)[0]] == [request(0)]


def test_a_copy_s_turns_begin_where_it_came_in():
    decider = policy()
    turns(decider, {0: MIXED}, 0, 4000)
    raced = {0: MIXED, 1: {0: drafted(0.1)}}
    assert [move.engine for move in turns(decider, raced, 4500)[0]] == []
    assert sorted(move.engine for move in turns(decider, raced, 5500)[0]) == [0, 1]


@pytest.mark.parametrize("told", [None, drafted(None), drafted(0.1, None)])
def test_of_whom_nothing_is_known_nothing_is_decided(told):
    decided = turns(policy(), {0: {**MIXED, 0: told}}, 0, 1000)[-1]
    assert request(0) not in {move.id for move in decided}


def test_alike_ones_are_not_below_their_mean():
    alike = {0: {i: drafted(0.4) for i in range(4)}}
    assert turns(policy(), alike, 0, 1000) == [[], []]


def test_the_mean_is_that_of_the_moment():
    """At 1000 tokens request 0 is below it; by its next turn the others have fallen."""
    decider = policy()
    assert turns(decider, {0: {0: drafted(0.4)}, 1: {1: drafted(0.8)}}, 0, 1000)[-1]
    assert turns(decider, {0: {0: drafted(0.4)}, 1: {1: drafted(0.4)}}, 2000) == [[]]


def test_a_plan_without_drafter_gpus_stays_coupled():
    slow = AffineLatency(drafters={"small": (8e-3, 0.0)})
    decoupled = RequestModel(replace(MODEL.ladder, latency=slow), coupled=False)
    assert not decoupled.best_setting("small", 0.9).coupled
    assert replace(decoupled, coupled=True).best_setting("small", 0.9).coupled


@settings(deadline=None, max_examples=40)
@given(affine_latencies, st.floats(0, 1), st.booleans())
def test_no_setting_is_faster(latency, p, coupled):
    model = RequestModel(Ladder(latency, 4, ("small",), 1000.0, max_window=6), coupled)
    best = model.best_setting("small", p)
    assert best.drafter == "small"
    speeds = []
    for w in range(1, 7):
        v = latency.verify_s(4, 1, 1000.0, w)
        d = latency.draft_s("small", 1, w)
        speeds.append((coupled_tokens_per_s(w, p, d, v), DraftSetting("small", w)))
        if not coupled:
            streamed = streamed_tokens_per_s(w, p, d / w, v)
            speeds.append((streamed, DraftSetting("small", w, coupled=False)))
    assert model.tokens_per_s(best, p) == pytest.approx(max(speed for speed, _ in speeds))
    assert any(setting == best for _, setting in speeds)


def test_misguessed_requests_draft_less_far():
    windows = [MODEL.best_setting("small", p).window for p in (0.1, 0.5, 0.9)]
    assert windows == sorted(windows)
    assert windows[0] < windows[-1]


def test_requests_that_are_gone_are_forgotten():
    decider = policy()
    turns(decider, {0: MIXED}, 0)
    turns(decider, {0: {5: drafted(0.5)}}, 10)
    assert list(decider._turns[0]) == [request(5)]


def test_a_decision_is_quick():
    """One engine of 64 changed, with 256 requests each; no turn: 320,000 such in a simulation."""
    decider = policy()
    view = view_of({e: {256 * e + i: drafted(0.5, SMALL) for i in range(256)} for e in range(64)})
    decider.decide(view)
    engines = list(view.engines)

    def once():
        engines[3] = replace(engines[3])
        decider.decide(replace(view, engines=tuple(engines)))

    assert min(timeit.repeat(once, number=5, repeat=5)) / 5 < 2e-3
