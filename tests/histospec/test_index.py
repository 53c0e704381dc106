"""The index gives the drafts of a slow reference that looks at every suffix."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refrain.engines.histospec.bloom_filter import build_filter, may_contain
from refrain.engines.histospec.drafting import (
    ENOUGH,
    LONGEST_ALONE,
    NUM_EVIDENCE,
    SURE,
    draft_batch,
    without_noise,
    without_turns,
)
from refrain.engines.histospec.index import END, RESOLUTION, build_index
from refrain.engines.histospec.matching import NO_INDEX, IndexTable, _place_of

TOKENS = st.lists(st.integers(0, 2), max_size=14)
REWARDS = st.sampled_from([-1.5, -0.25, 0.0, 0.1, 0.2, 0.3, 1.0, 1e6])
RESPONSES = st.lists(st.tuples(TOKENS, REWARDS), max_size=5)


def draft(index, context, window):
    return draft_rows([(index, context, window)])[0]


def draft_rows(rows):
    drafts, _ = drafts_and_evidence(rows)
    return drafts


def drafts_and_evidence(rows, worth=LONGEST_ALONE):
    table = IndexTable()
    slots = [NO_INDEX if index is None else table.add(index) for index, _, _ in rows]
    width = max(1, *(len(context) for _, context, _ in rows))
    token_ids = np.full((len(rows), width), 7, np.int32)
    for i, (_, context, _) in enumerate(rows):
        token_ids[i, : len(context)] = context
    drafts = np.full((len(rows), 40), -9, np.int32)
    evidence = np.full(drafts.shape, NUM_EVIDENCE, np.uint16)
    num_drafts = draft_batch(
        table.rows,
        np.array(slots, np.int32),
        token_ids,
        np.array([len(context) for _, context, _ in rows], np.int32),
        np.array([window for _, _, window in rows], np.int32),
        without_noise(len(rows)),
        without_turns(len(rows)),
        worth,
        drafts,
        evidence,
    )
    assert all((evidence[i, :n] < NUM_EVIDENCE).all() for i, n in enumerate(num_drafts))
    if not len(worth):
        assert all((drafts[i, n:] == -9).all() for i, n in enumerate(num_drafts))
    return tuple(
        [array[i, :n].tolist() for i, n in enumerate(num_drafts)] for array in (drafts, evidence)
    )


def slow_draft(prompt, responses, context, window, min_match, max_match, is_drafted=lambda _: True):
    """Return the draft by definition: follow all suffixes of all responses token by token.
    `is_drafted`: whether a token may be in a draft."""
    least = min([0.0, *(reward for _, reward in responses)])
    texts = [
        (prompt[-max_match:] + tokens, round((reward - least) / RESOLUTION))
        for tokens, reward in responses
    ]
    for length in range(min(max_match, len(context)), min_match - 1, -1):
        pattern = context[len(context) - length :]
        suffixes = [
            (text[i + length :], weight)
            for text, weight in texts
            for i in range(len(text) - length + 1)
            if text[i : i + length] == pattern
        ]
        drafted = []
        while len(drafted) < window:
            children = defaultdict(list)
            for suffix, weight in suffixes:
                if suffix and is_drafted(suffix[0]):
                    children[suffix[0]].append((suffix[1:], weight))
            if not children:
                break
            token = min(
                children,
                key=lambda t: (-sum(w for _, w in children[t]), -len(children[t]), t),
            )
            drafted.append(token)
            suffixes = children[token]
        if drafted:
            return drafted
    return []


@settings(max_examples=500, deadline=None)
@given(
    prompt=TOKENS,
    responses=RESPONSES,
    start=TOKENS,
    window=st.integers(0, 9),
    match=st.sampled_from([(1, 1), (1, 3), (3, 7), (2, 4)]),
    apart=st.sampled_from([1, 1000]),
)
@example(prompt=[0, 1, 2], responses=[([1, 1], 1.0)], start=[], window=4, match=(3, 7), apart=1)
@example(prompt=[], responses=[([0, 0, 0, 0], 0.1)] * 3, start=[0], window=9, match=(1, 3), apart=1)
def test_index_equals_brute_force(prompt, responses, start, window, match, apart):
    """`apart`: token ids that lie far apart use another lookup table than close ones."""
    min_match, max_match = match
    prompt, start = [apart * token for token in prompt], [apart * token for token in start]
    responses = [([apart * token for token in tokens], reward) for tokens, reward in responses]
    index = build_index(
        prompt,
        [tokens for tokens, _ in responses],
        [reward for _, reward in responses],
        min_match=min_match,
        max_match=max_match,
        max_draft=9,
    )
    contexts = [prompt, prompt + start, start, *(prompt + t[:5] for t, _ in responses)]
    for context in contexts:
        expected = slow_draft(prompt, responses, context, window, min_match, max_match)
        assert draft(index, context, window) == expected


def num_matches(responses, pattern):
    return sum(
        tokens[i : i + len(pattern)] == pattern
        for tokens in responses
        for i in range(len(tokens) - len(pattern) + 1)
    )


@settings(max_examples=500, deadline=None)
@given(
    responses=st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=6),
    context=st.lists(st.integers(0, 2), min_size=2, max_size=9),
    window=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_a_shorter_match_drafts_where_it_is_worth_more(responses, context, window, seed):
    """The index compares the longest match with the longest of `ENOUGH` occurrences."""
    worth = np.random.default_rng(seed).random(NUM_EVIDENCE)

    def drafted(most, worth=LONGEST_ALONE):
        rewards = [0.0] * len(responses)
        index = build_index([], responses, rewards, min_match=2, max_match=most, max_draft=9)
        (draft,), (evidence,) = drafts_and_evidence([(index, context, window)], worth)
        return draft, float(np.cumprod(np.append(1.0, worth_of[evidence]))[1:].sum())

    worth_of = worth
    found = [n for n in range(2, len(context) + 1) if num_matches(responses, context[-n:])]
    longest, expected = drafted(8)
    # If only ends follow the longest match, a shorter one drafts first.
    first = next((n for n in reversed(found[: 8 - 1]) if drafted(n)[0] == longest), 2)
    often = [n for n in found if n < first and num_matches(responses, context[-n:]) >= ENOUGH]
    shorter, instead = drafted(max(often)) if often else (longest, 0.0)
    rare = num_matches(responses, context[-first:]) < ENOUGH
    takes_shorter = rare and first > 2 and expected < SURE * window and instead > expected
    assert drafted(8, worth)[0] == (shorter if takes_shorter else longest)


@given(
    tokens=st.sets(st.integers(-1, 10**6), min_size=1, max_size=60), other=st.integers(-5, 10**6)
)
def test_tokens_are_found_however_they_are_spread(tokens, other):
    known = np.array(sorted(tokens), np.int32)
    for token in (*known, other, known[0] - 1, known[-1] + 1):
        expected = known.tolist().index(token) if token in tokens else -1
        assert _place_of(known, np.int32(token)) == expected


def test_a_sieve_lets_through_what_occurs_and_little_else():
    rng, num_tokens = np.random.default_rng(0), 5000
    text = rng.integers(0, 500, num_tokens, dtype=np.int32)
    text[2000] = END
    words = build_filter(text, 3)
    runs = [text[i : i + 3] for i in range(num_tokens - 2) if END not in text[i : i + 3]]
    assert all(may_contain(words, run, 3, 3) for run in runs)
    others = rng.integers(500, 1000, (2000, 3), dtype=np.int32)
    assert np.mean([may_contain(words, other, 3, 3) for other in others]) < 0.3
    assert words.nbytes <= 0.4 * num_tokens


def test_the_first_token_is_drafted_from_the_prompts_tail():
    index = build_index([5, 6, 7, 8], [[1, 2, 3]], [1.0])
    assert draft(index, [5, 6, 7, 8], 2) == [1, 2]


def test_the_rewarded_branch_is_drafted_though_it_is_rarer():
    responses, rewards = [[1, 2, 3, 9], [1, 2, 3, 4], [1, 2, 3, 4]], [1.0, 0.2, 0.3]
    assert draft(build_index([], responses, rewards), [1, 2, 3], 1) == [9]
    assert draft(build_index([], responses, [0.0] * 3), [1, 2, 3], 1) == [4]


def test_sums_are_exact():
    """In floating point 0.1 + 0.2 exceeds 0.3, which would break this tie the wrong way."""
    responses = [[1, 2, 3, 9], [1, 2, 3, 9], [1, 2, 3, 4], [1, 2, 3, 4]]
    assert draft(build_index([], responses, [0.1, 0.2, 0.3, 0.0]), [1, 2, 3], 1) == [4]


def test_a_negative_reward_does_not_make_more_responses_less():
    responses = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 9]]
    assert draft(build_index([], responses, [0.0, 0.0, -1.0]), [1, 2, 3], 1) == [4]


def test_a_reward_too_large_for_exact_sums_is_refused():
    with pytest.raises(AssertionError, match="too large"):
        build_index([], [[1]], [1e20])


def test_rows_have_indexes_of_their_own():
    one, two = build_index([], [[1, 2, 3, 4]], [1.0]), build_index([], [[1, 2, 3, 5, 6]], [1.0])
    rows = [(two, [1, 2, 3], 9), (None, [1, 2, 3], 9), (one, [1, 2, 3], 9), (one, [1, 2, 3], 0)]
    assert draft_rows(rows) == [[5, 6], [], [4], []]


def test_a_slot_is_used_again():
    table = IndexTable()
    slots = [table.add(build_index([], [[1, 2, 3, i]], [1.0])) for i in range(40)]
    assert len(set(slots)) == 40
    table.remove(slots[3])
    assert table.add(build_index([], [[1]], [1.0])) == slots[3]


def test_sixteen_bytes_a_token():
    rng = np.random.default_rng(0)
    index = build_index([], list(rng.integers(0, 1000, (16, 1000))), [1.0] * 16)
    assert index.num_bytes <= 17 * len(index.text)
