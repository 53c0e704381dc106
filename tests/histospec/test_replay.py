"""The replay against one response at a time, one token at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.histospec.drafting import NO_INDEX, IndexTable
from engines.histospec.index import build_index
from engines.histospec.replay import replay
from engines.histospec.window import AIMD, Doubling
from tests.histospec.test_index import slow_draft

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=25)


def slow_replay(prompt, response, history, policy):
    context, left = list(prompt), list(response)
    windows = policy.first(1)
    passes = verifications = num_drafted = num_accepted = 0
    while left:
        window = min(int(windows[0]), len(left) - 1)
        drafted = slow_draft(prompt, history, context, window, 3, 7) if history else []
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == left[accepted]:
            accepted += 1
        passes += 1
        verifications += bool(drafted)
        num_drafted += len(drafted)
        num_accepted += accepted
        windows = policy.next(windows, np.array([len(drafted)]), np.array([accepted]))
        context += left[: accepted + 1]
        left = left[accepted + 1 :]
    return passes, verifications, num_drafted, num_accepted


@settings(max_examples=300, deadline=None)
@given(
    prompt=TOKENS,
    history=st.lists(st.tuples(TOKENS, st.sampled_from([0.0, 1.0])), max_size=3),
    responses=st.lists(TOKENS, min_size=1, max_size=3),
    policy=st.sampled_from([AIMD(), Doubling(start=3, cap=8)]),
)
def test_replay_equals_token_by_token(prompt, history, responses, policy):
    table = IndexTable()
    texts, rewards = [t for t, _ in history], [r for _, r in history]
    slot = table.add(build_index(prompt, texts, rewards)) if history else NO_INDEX
    slots = np.full(len(responses), slot, np.int32)
    got = replay([prompt] * len(responses), responses, table.rows, slots, policy)
    expected = [slow_replay(prompt, response, history, policy) for response in responses]
    counts = (got.num_passes, got.num_verifications, got.num_drafted, got.num_accepted)
    assert list(zip(*(c.tolist() for c in counts), strict=True)) == expected


def test_rates():
    """The same answer again: 11 tokens in drafts of 2, 4 and 2, each with a token of the pass."""
    prompt, answer = [9, 8, 7], list(range(10, 21))
    table = IndexTable()
    slots = np.array([table.add(build_index(prompt, [answer], [1.0]))], np.int32)
    got = replay([prompt], [answer], table.rows, slots, AIMD())
    assert got.num_passes.tolist() == [3]
    assert got.acceptance_rate == 1.0
    assert got.acceptance_length == pytest.approx(11 / 3)
    assert got.speculation_rate == pytest.approx(8 / 11)
