"""Drafting counts of a step add up. Turns tell sampled tokens from observed ones."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from refrain.schemas.counts import DraftingCounts
from refrain.schemas.rollout import (
    FinishReason,
    Generated,
    RequestId,
    Rollout,
    RolloutRequest,
    Split,
    Turn,
)

ended_turns = st.lists(st.builds(Turn, st.integers(1, 5), st.integers(0, 5)), max_size=5)


def generated_of(turns: list[Turn], num_open: int) -> Generated:
    """Return a response with these turns and this many tokens of a turn that goes on."""
    num_tokens = sum(turn.num_tokens for turn in turns) + num_open
    return Generated(range(num_tokens), [], (), turns=tuple(turns))


def test_counts_add_up_and_the_latest_costs_are_kept():
    early = DraftingCounts(num_steps=3, draft_s=0.5, decode_s=1.0, step_costs=(1.0,))
    late = DraftingCounts(num_steps=4, verify_s=2.0, step_costs=(2.0,))
    both = DraftingCounts(7, draft_s=0.5, decode_s=1.0, verify_s=2.0, step_costs=(2.0,))
    assert early + late == both
    assert (late + DraftingCounts()).step_costs == (2.0,)


@given(ended_turns, st.integers(0, 5))
def test_sampled_and_observed_tokens_are_the_response(turns: list[Turn], num_open: int) -> None:
    generated = generated_of(turns, num_open)
    sides = [side for t in turns for side in "s" * t.num_sampled + "o" * (t.num_observed or 0)]
    sides += "s" * num_open
    sampled = [at for own in generated.sampled for at in own]
    assert sampled == [at for at, side in enumerate(sides) if side == "s"]
    assert (generated.num_sampled, generated.num_observed) == (len(sampled), sides.count("o"))


@given(ended_turns, st.integers(1, 5))
def test_a_last_turn_without_an_answer_is_the_turn_that_goes_on(
    turns: list[Turn], num_sampled: int
) -> None:
    going_on, ended = generated_of(turns, num_sampled), [*turns, Turn(num_sampled)]
    assert generated_of(ended, 0) == replace(going_on, turns=tuple(ended))
    assert generated_of(ended, 0).sampled == going_on.sampled


def test_a_response_without_turns_is_sampled() -> None:
    generated = Generated([5, 6, 7], [0.0] * 3, ())
    assert (generated.num_sampled, generated.num_observed) == (3, 0)
    assert generated.sampled == (range(3),)
    assert Generated([], [], ()).sampled == ()


def test_a_rollout_counts_what_was_sampled() -> None:
    request = RolloutRequest(RequestId(Split.TRAIN, 1, "a", 0), (1,), 0, 100)
    rollout = Rollout(request, generated_of([Turn(2, 3), Turn(4)], 0), FinishReason.TURNS, 0, 0, 1)
    told = rollout.without_tokens(0)
    assert (rollout.num_tokens, told.num_tokens, told.num_observed) == (6, 6, 3)
    single = replace(rollout, generated=replace(rollout.generated, turns=()))
    assert (single.num_tokens, single.without_tokens(0).num_observed) == (9, 0)
    assert single.token_digest == rollout.token_digest
