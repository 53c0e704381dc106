"""Similarity of responses, lengths and ranks between epochs, checked by a slow search."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.accounting.epoch_similarity import (
    PREFIX,
    length_changes,
    rank_changes,
    similarity,
)

tokens = st.lists(st.integers(0, 3), max_size=30)


def as_arrays(epoch):
    return {key: [as_read(response) for response in own] for key, own in epoch.items()}


def as_read(response):
    """Return a response as a store returns it."""
    array = np.array(response, np.int32)
    array.flags.writeable = False
    return array


def searched(response, responses):
    """Return the lengths of a response's stretches, searched as section 5.1 describes."""
    found, at = [], PREFIX
    while at < len(response):
        best = 0
        for other in responses:
            for start in range(PREFIX, len(other) + 1):
                if other[start - PREFIX : start] != response[at - PREFIX : at]:
                    continue
                length = 0
                while other[start + length : start + length + 1] and (
                    other[start + length : start + length + 1]
                    == response[at + length : at + length + 1]
                ):
                    length += 1
                best = max(best, length)
        if best:
            found.append(best)
        at += max(1, best)
    return found


@settings(max_examples=300, deadline=None)
@given(now=st.lists(tokens, max_size=3), before=st.lists(tokens, max_size=3))
def test_stretches_are_those_of_a_plain_search(now, before):
    one = similarity(1, as_arrays({"p": now}), as_arrays({"p": before}))
    expected = [length for response in now for length in searched(response, before)]
    assert one.segments.tolist() == expected
    assert one.num_tokens == sum(map(len, now))
    assert one.rates.tolist() == pytest.approx(
        [sum(searched(r, before)) / max(1, len(r)) for r in now]
    )


def test_other_prompts_do_not_count_as_similar():
    same = [list(range(20))]
    one = similarity(1, as_arrays({"p": same, "q": same}), as_arrays({"q": same}))
    assert (one.num_tokens, one.segments.tolist(), one.share) == (20, [17], 17 / 20)


def test_matches_end_at_the_end_of_a_response():
    before = {"p": [[1, 2, 3], [4, 5, 6]]}
    one = similarity(1, as_arrays({"p": [[1, 2, 3, 4, 5, 6]]}), as_arrays(before))
    assert one.segments.tolist() == []


def test_responses_against_their_ranking_group():
    before = {"short": [8, 10], "long": [90, 100]}
    now = {"short": [9, 10, 10, 10, 10, 10, 10, 10, 11, 30], "long": [100] * 9 + [104]}
    one = rank_changes(1, 2, now, before, {})
    assert (one.accurate, one.not_last, one.within, one.outgrown) == (
        pytest.approx(17 / 20),
        pytest.approx(1 / 20),
        pytest.approx(1 / 20),
        pytest.approx(1 / 20),
    )
    # Lengths that grew by half in the epoch before are expected to grow again.
    earlier = {"short": [3, 3], "long": [31, 31]}
    grown = rank_changes(1, 2, now, before, earlier)
    assert (grown.outgrown, grown.within) == (0.0, pytest.approx(2 / 20))


def test_epochs_without_common_prompts_have_no_similarity():
    one = rank_changes(1, 8, {"p": [1]}, {"q": [1]}, {})
    assert one.accurate == one.outgrown == 0.0


def test_medians_against_the_last_epoch():
    before = {"a": [10, 20, 90], "b": [30], "c": [60], "gone": [5]}
    now = {"a": [30, 10, 31], "b": [31], "c": [40], "new": [7]}
    one = length_changes(1, now, before)
    assert (one.grown, one.shrunk) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    # The ranks stayed 1, 2, 3.
    assert one.rank_correlation == pytest.approx(1.0)
    assert one.tokens[-1] == 40
    turned = length_changes(1, {"a": [70], "b": [31], "c": [3]}, before)
    assert turned.rank_correlation == pytest.approx(-1.0)


def test_equal_medians_are_not_reported():
    assert length_changes(0, {"a": [1, 3]}, {}).grown is None
    same = length_changes(1, {"a": [2], "b": [2]}, {"a": [2], "b": [3]})
    assert (same.rank_correlation, same.grown) == (None, 0.0)
