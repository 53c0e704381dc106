"""Prompt lookup equals a slow reference implementation."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.benchmarks.drafters import NGRAM_WINDOW, look_up

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=25)


def slow_look_up(tokens, room):
    for length in (4, 3, 2):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length :][: min(NGRAM_WINDOW, room)]
    return []


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(TOKENS, st.integers(0, 6)), min_size=1, max_size=4))
def test_lookups_equal_brute_force(rows):
    width = max(len(tokens) for tokens, _ in rows)
    token_ids = np.full((len(rows), width + 3), 1, np.int32)
    for i, (tokens, _) in enumerate(rows):
        token_ids[i, : len(tokens)] = tokens
    num_tokens, room = (
        np.array(column, np.int32)
        for column in zip(*((len(tokens), room) for tokens, room in rows), strict=True)
    )
    drafts = np.full((len(rows), NGRAM_WINDOW), -9, np.int32)
    num_drafted = look_up(token_ids, num_tokens, room, drafts)
    got = [draft[:n].tolist() for draft, n in zip(drafts, num_drafted, strict=True)]
    assert got == [slow_look_up(*row) for row in rows]
