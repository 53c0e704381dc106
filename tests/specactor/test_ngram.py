"""Prompt lookup drafts what a search through the whole text finds."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refrain.engines.histospec.siblings import NO_SLOT, PAGE
from refrain.engines.specactor.ngram import NgramDrafter


def slow_draft(tokens, window, min_match, max_match):
    """Return the draft by definition: the longest match first, then the most recent one."""
    for length in range(max_match, min_match - 1, -1):
        pattern = tokens[len(tokens) - length :]
        for end in range(len(tokens) - 1, length - 1, -1):
            if length <= len(tokens) and tokens[end - length : end] == pattern:
                return tokens[end : end + window]
    return []


def propose(drafter, slots, texts, windows):
    """Return the draft of each text. The array has ones after each text: they must not be read."""
    token_ids = np.ones((len(texts), max(map(len, texts)) + 3), np.int32)
    for row, text in zip(token_ids, texts, strict=True):
        row[: len(text)] = text
    drafts = np.full((len(texts), 20), -9, np.int32)
    num_drafts = drafter.propose(
        np.array(slots, np.int32),
        token_ids,
        np.array([len(text) for text in texts], np.int32),
        np.array(windows, np.int32),
        drafts,
    )
    assert all((drafts[i, n:] == -9).all() for i, n in enumerate(num_drafts))
    return [drafts[i, :n].tolist() for i, n in enumerate(num_drafts)]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_tokens=st.sampled_from([1, 2, 3, 3, 50]),
    steps=st.lists(st.sampled_from([1, 1, 2, 3, 9, 130]), min_size=3, max_size=20),
    match=st.sampled_from([(1, 1), (1, 3), (2, 7), (3, 4)]),
)
@example(seed=0, num_tokens=3, steps=[3 * PAGE] * 12, match=(2, 7))
def test_drafts_equal_a_search_through_the_text(seed, num_tokens, steps, match):
    """Requests come with a text, leave, and reuse slots. No request may read another's text."""
    rng = np.random.default_rng(seed)
    drafter = NgramDrafter(min_match=match[0], max_match=match[1])
    texts = {}
    for most in steps:
        if len(texts) < 4:
            texts[drafter.add()] = rng.integers(0, num_tokens, rng.integers(0, 3 * PAGE)).tolist()
        for text in texts.values():
            text += rng.integers(0, num_tokens, rng.integers(0, most + 1)).tolist()
        # Some rows skip a step. The drafter catches up when they return.
        slots = [slot for slot in rng.permutation(list(texts)).tolist() if rng.random() < 0.9]
        windows = rng.integers(0, 20, len(slots) + 1).tolist()
        rows = [texts[slot] for slot in slots]
        expected = [slow_draft(*pair, *match) for pair in zip(rows, windows, strict=False)]
        got = propose(drafter, [*slots, NO_SLOT], [*rows, [1] * 9], windows)
        assert got == [*expected, []]
        if rng.random() < 0.3:
            slot = int(rng.choice(list(texts)))
            del texts[slot]
            drafter.index.remove(slot)


def test_the_prompt_drafts_from_its_first_token():
    drafter = NgramDrafter()
    prompt = [*range(100, 120), 0, 100, 101]
    assert propose(drafter, [drafter.add()], [prompt], [5]) == [[102, 103, 104, 105, 106]]


def test_the_longest_match_wins_and_then_the_most_recent():
    drafter = NgramDrafter()
    text = [1, 2, 3, 4, 9, 2, 3, 5, 9, 2, 3, 6, 9, 8, 2, 3]
    assert propose(drafter, [drafter.add()], [text], [1]) == [[6]]
    assert propose(drafter, [drafter.add()], [[*text[:-3], 1, 2, 3]], [1]) == [[4]]


def test_another_request_of_the_same_text_is_not_read():
    drafter = NgramDrafter()
    slots = [drafter.add(), drafter.add()]
    assert propose(drafter, slots, [[1, 2, 3, 4], [1, 2]], [4, 4]) == [[], []]


def test_a_text_goes_with_its_request():
    drafter = NgramDrafter()
    slots = [drafter.add(), drafter.add()]
    propose(drafter, slots, [[1, 2, 3, 1, 2]] * 2, [4, 4])
    num_bytes = drafter.index.num_bytes
    drafter.index.remove(slots[0])
    assert drafter.index.num_bytes == num_bytes / 2 > 0
    drafter.index.remove(slots[1])
    assert drafter.index.num_bytes == 0
    assert propose(drafter, [drafter.add()], [[1, 2]], [4]) == [[]]
