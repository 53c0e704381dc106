"""Paces agree with sums by hand, for one way of drafting and for several in one batch."""

import pytest

from refrain.engines.latency.drafting_pace import batch_paces, pace
from refrain.engines.latency.expectation import StreamedStep, rounded_pace, streamed_step
from refrain.schemas.rollout import DraftSetting

IN_TURN = DraftSetting("small", 3), 0.5
AHEAD = DraftSetting("small", 3, coupled=False), 0.5
TOKEN_S, WINDOW_S = 4e-3, 12e-3


def drafting_s(setting: DraftSetting) -> float:
    return WINDOW_S if setting.coupled else TOKEN_S


def verify_s(num_verified: float) -> float:
    return 10e-3 + 1e-3 * num_verified


def arriving(drafts_per_step: float, *, alone: bool = False) -> StreamedStep:
    return streamed_step(3, 0.5, rounded_pace(3, drafts_per_step), alone)


def test_drafting_in_turn_and_verification_add_up():
    found = pace(IN_TURN, 8, WINDOW_S, verify_s)
    assert found == (1 + 0.5 + 0.25 + 0.125, 3, WINDOW_S, WINDOW_S + 13e-3)
    assert found.tokens_per_s == pytest.approx(1.875 / 25e-3)


@pytest.mark.parametrize("batch", [1, 8])
def test_a_step_verifies_the_drafts_of_one_step(batch):
    found = pace(AHEAD, batch, TOKEN_S, verify_s)
    assert found.step_s == pytest.approx(verify_s(found.num_verified), rel=2e-3)
    step = arriving(found.step_s / TOKEN_S, alone=batch == 1)
    assert (found.tokens, found.num_verified) == (step.tokens, step.num_verified)
    assert pace(AHEAD, 8, 0.0, verify_s).tokens == arriving(1e9).tokens


def test_drafts_arrive_while_others_draft_before_the_step():
    """With one request that drafts in turn, a step also has the time in which it is drafted for."""
    both = batch_paces({IN_TURN: 1, AHEAD: 2}, 4, drafting_s, verify_s)
    one, other = both[IN_TURN], both[AHEAD]
    assert one.step_s == other.step_s
    mean = (3 + 2 * other.num_verified) / 4
    assert one.step_s == pytest.approx(WINDOW_S + verify_s(mean), rel=2e-3)
    assert other.tokens == arriving(one.step_s / TOKEN_S).tokens
    assert other.tokens > pace(AHEAD, 4, TOKEN_S, verify_s).tokens
