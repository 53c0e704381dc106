"""Drafts on the device, by their definition: what most often follows the longest match."""

import numpy as np
import pytest

from refrain.engines.histospec.index import END, build_index
from refrain.engines.histospec.matching import NO_INDEX, IndexTable
from refrain.engines.histospec.refill import refill


def draft(histories, context, window=8):
    """Draft for one row from indexes of these responses."""
    table = IndexTable()
    slots = [
        NO_INDEX
        if responses is None
        else table.add(build_index([9], responses, [0.0] * len(responses)))
        for responses in histories
    ]
    drafts = np.zeros((1, window), np.int32)
    num_drafts = refill(
        table.rows,
        np.array([slots], np.int32),
        np.array([[*context, 7, 7]], np.int32),
        np.array([len(context)], np.int32),
        np.array([window], np.int32),
        drafts,
    )
    assert not drafts[0, num_drafts[0] :].any()
    return drafts[0, : num_drafts[0]].tolist()


def test_repetitive_text_is_drafted_to_its_end():
    text = [1, 2, 3, 4, 5, 6] * 5
    assert draft([[text]], [8, 1, 2, 3], 12) == [4, 5, 6, 1, 2, 3] * 2
    assert draft([[text]], [1, 2]) == []
    assert draft([[text]], [8, 1, 2, 3], 0) == []


def test_the_longest_match_is_drafted_from_even_where_a_shorter_one_is_frequent():
    often, once = [5, 1, 2, 3, 4], [6, 1, 2, 3, 8, 8]
    assert draft([[often, often, once]], [1, 2, 3]) == [4]
    assert draft([[often, often, once]], [6, 1, 2, 3]) == [8, 8]
    assert draft([[often, often], [once]], [6, 1, 2, 3]) == [8, 8]
    assert draft([[once], [often, often]], [6, 1, 2, 3]) == [8, 8]


def test_a_majority_wins():
    one, other = [1, 2, 3, 4, 4], [1, 2, 3, 6, 6]
    assert draft([[one, other, other]], [1, 2, 3]) == [6, 6]
    assert draft([[one, one, other]], [1, 2, 3]) == [4, 4]


def test_of_equally_long_matches_the_more_frequent_wins_then_the_first():
    one, other = [1, 2, 3, 4], [1, 2, 3, 6]
    assert draft([[one], [other, other]], [1, 2, 3]) == [6]
    assert draft([[other, other], [one]], [1, 2, 3]) == [6]
    assert draft([[one], [other]], [1, 2, 3]) == [4]
    assert draft([None, [], [other], [one]], [1, 2, 3]) == [6]


@pytest.mark.parametrize("responses", [[[1, 2, 3], [4, 5, 6]], [[4, 5, 6], [1, 2, 3]]])
def test_nothing_crosses_the_end_of_a_response(responses):
    assert draft([responses], [1, 2, 3]) == []
    assert draft([responses], [4, 5]) == []
    assert draft([responses], [1, 2, 3, 4, 5]) == []


def test_nothing_is_read_after_the_end_of_the_text():
    # The text and what lies after it would match, if one could look there.
    index = build_index([9], [[1, 2, 3]], [0.0])
    table = IndexTable()
    slot = table.add(index)
    memory = np.concatenate([index.text, np.full(8, 5, np.int32)])
    table.rows[slot, 0] = memory.ctypes.data
    drafts = np.zeros((2, 4), np.int32)
    num_drafts = refill(
        table.rows,
        np.full((2, 1), slot, np.int32),
        np.array([[1, 2, 3, END], [3, END, 5, 5]], np.int32),
        np.full(2, 4, np.int32),
        np.full(2, 4, np.int32),
        drafts,
    )
    assert num_drafts.tolist() == [0, 0]
