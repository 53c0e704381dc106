"""The sibling index gives the drafts of a slow reference that compares every token of the group."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refrain.engines.histospec import siblings
from refrain.engines.histospec.siblings import NO_SLOT, PAGE, SiblingIndex

MATCHES = st.sampled_from([(1, 1), (1, 3), (3, 7), (2, 4)])


class SlowIndex:
    """Drafts by definition: compares all places of the group token by token, the latest first."""

    def __init__(self, min_match, max_match):
        self.matches = (min_match, max_match)
        self.places = {}
        """For each group its places (text, position), the oldest first."""
        self.forgotten = set()

    def extend(self, row):
        places = self.places.setdefault(row.group, [])
        for token in row.tokens[row.start + len(row.text) :]:
            places.append((row.text, len(row.text)))
            row.text.append(token)

    def draft(self, row, window):
        """Return the draft and the length of the match."""
        min_match, max_match = self.matches
        for length in range(min(max_match, len(row.tokens)), min_match - 1, -1):
            pattern = row.tokens[len(row.tokens) - length :]
            for text, place in reversed(self.places.get(row.group, [])):
                if place >= length and text[place - length : place] == pattern:
                    return text[place : place + window], length
        return [], 0


class Row:
    def __init__(self, index, group, prompt, max_match=7):
        self.group, self.tokens, self.text = group, list(prompt), []
        self.start = max(0, len(prompt) - max_match)
        self.slot = index.add(group, len(prompt))


def arrays(rows):
    """Return slots, token ids and lengths of the rows. Tokens beyond a length are noise, and the
    first and last rows have no request."""
    rows = [None, *rows, None]
    width = max(len(row.tokens) for row in rows if row) + 3 if len(rows) > 2 else 3
    token_ids = np.ones((len(rows), width), np.int32)
    for line, row in zip(token_ids, rows, strict=True):
        line[: len(row.tokens) if row else 0] = row.tokens if row else []
    slots = np.array([row.slot if row else NO_SLOT for row in rows], np.int32)
    return slots, token_ids, np.array([len(row.tokens) if row else 3 for row in rows], np.int32)


def extend(index, *rows):
    index.extend(*arrays(rows))


def draft(index, *rows, windows=None):
    """Return the draft and the length of the match for each row."""
    windows = np.array([4, *(windows or [20] * len(rows)), 4], np.int32)
    drafts = np.full((len(windows), 20), -9, np.int32)
    matched = np.full(len(windows), -9, np.int32)
    num_drafts = index.draft(*arrays(rows), windows, drafts, matched)
    assert all((drafts[i, n:] == -9).all() for i, n in enumerate(num_drafts))
    assert num_drafts[[0, -1]].tolist() == matched[[0, -1]].tolist() == [0, 0]
    result = [drafts[i, :n].tolist() for i, n in enumerate(num_drafts)]
    return list(zip(result, matched.tolist(), strict=True))[1:-1]


def drafted(index, row):
    return draft(index, row)[0][0]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_tokens=st.sampled_from([1, 2, 3, 3, 4, 50]),
    num_groups=st.integers(1, 3),
    steps=st.lists(st.sampled_from([1, 1, 2, 3, 5, 9, 40, 130]), min_size=4, max_size=20),
    match=MATCHES,
)
@example(seed=0, num_tokens=2, num_groups=2, steps=[130] * 20, match=(1, 1))
@example(seed=1, num_tokens=3, num_groups=2, steps=[130] * 20, match=(3, 7))
def test_index_equals_brute_force(seed, num_tokens, num_groups, steps, match):
    rng = np.random.default_rng(seed)
    index = SiblingIndex(min_match=match[0], max_match=match[1])
    slow, rows = SlowIndex(*match), []
    prompts = [rng.integers(0, num_tokens, rng.integers(0, 12)).tolist() for _ in range(num_groups)]
    for most in steps:
        if len(rows) < 5:
            group = int(rng.integers(num_groups))
            rows.append(Row(index, str(group), prompts[group], match[1]))
        for row in rows:
            row.tokens += rng.integers(0, num_tokens, rng.integers(0, most + 1)).tolist()
        rows = [rows[i] for i in rng.permutation(len(rows))]
        # Leave some rows out: their tokens come in a later call.
        new = [row for row in rows if rng.random() < 0.9]
        extend(index, *new)
        for row in new:
            slow.extend(row)
        windows = rng.integers(0, 20, len(rows)).tolist()
        expected = [slow.draft(row, window) for row, window in zip(rows, windows, strict=True)]
        expected = [pair if pair[0] else ([], 0) for pair in expected]
        assert draft(index, *rows, windows=windows) == expected
        if rng.random() < 0.3:
            index.remove(rows.pop().slot)
        if rng.random() < 0.1:
            slow.forgotten = {str(group) for group in range(num_groups)}
            for group in slow.forgotten:
                index.forget(group)
        for group in slow.forgotten - {row.group for row in rows}:
            slow.forgotten.remove(group)
            slow.places.pop(group, None)


def test_the_first_token_is_drafted_from_the_prompts_tail():
    index, prompt = SiblingIndex(), list(range(20))
    one, two = Row(index, "a", prompt), Row(index, "a", prompt)
    one.tokens += [30, 31, 32]
    extend(index, one, two)
    assert draft(index, one, two) == [([], 0), ([30, 31, 32], 7)]


def test_samples_in_lockstep_cannot_draft():
    index, prompt = SiblingIndex(), [1, 2, 3]
    rows = [Row(index, "a", prompt) for _ in range(3)]
    for token in (4, 5, 6):
        for row in rows:
            row.tokens.append(token)
        extend(index, *rows)
        assert draft(index, *rows) == [([], 0)] * 3
    rows[1].tokens += [7, 8]
    extend(index, *rows)
    assert draft(index, *rows) == [([7, 8], 6), ([], 0), ([7, 8], 6)]


def test_row_matches_its_earlier_text_only():
    index = SiblingIndex()
    row = Row(index, "a", [])
    row.tokens += [1, 2, 3, 4, 5, 1, 2, 3]
    extend(index, row)
    assert drafted(index, row) == [4, 5, 1, 2, 3]
    row.tokens += [6]
    extend(index, row)
    assert drafted(index, row) == []


@pytest.mark.parametrize("num_tokens", [PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_a_draft_goes_over_pages_but_never_into_another_response(num_tokens):
    index = SiblingIndex()
    one, two, three = (Row(index, "a", []) for _ in range(3))
    for i in range(num_tokens):
        # Both rows allocate pages in turn.
        one.tokens.append(100 + i)
        two.tokens.append(500 + i)
        extend(index, one, two)
    for end in range(3, num_tokens + 1):
        three.tokens = one.tokens[:end]
        assert drafted(index, three) == one.tokens[end : end + 20]


def test_no_draft_from_another_group():
    index = SiblingIndex()
    one, other = Row(index, "a", [1, 2, 3]), Row(index, "b", [1, 2, 3])
    one.tokens += [4, 5]
    extend(index, one, other)
    assert drafted(index, other) == []
    index.remove(one.slot)
    index.forget("a")
    again = Row(index, "c", [1, 2, 3])
    extend(index, again)
    assert drafted(index, again) == []


def test_a_finished_text_serves_those_that_wait():
    index = SiblingIndex()
    one = Row(index, "a", [1, 2, 3])
    one.tokens += [4, 5]
    extend(index, one)
    index.remove(one.slot)
    assert drafted(index, Row(index, "a", [1, 2, 3])) == [4, 5]


def test_a_forgotten_group_goes_with_its_last_request():
    index = SiblingIndex()
    rows = [Row(index, "a", [1, 2, 3]) for _ in range(3)]
    rows[0].tokens += [4, 5]
    extend(index, *rows)
    index.forget("a")
    index.remove(rows[0].slot)
    assert drafted(index, rows[1]) == [4, 5]
    index.remove(rows[1].slot)
    index.remove(rows[2].slot)
    assert index.num_bytes == 0
    assert drafted(index, Row(index, "a", [1, 2, 3])) == []


def run(index, group, num_tokens, seed):
    """Run a request from begin to end and return its row."""
    row = Row(index, group, [1, 2, 3])
    row.tokens += np.random.default_rng(seed).integers(0, 1000, num_tokens).tolist()
    extend(index, row)
    index.remove(row.slot)
    return row


def test_the_oldest_idle_groups_make_room():
    index = SiblingIndex(max_bytes=2**18)
    rows = []
    for i in range(20):
        rows.append(run(index, str(i), 700, i))
        assert index.num_bytes <= index.max_bytes
    kept = []
    for i, done in enumerate(rows):
        row = Row(index, str(i), [])
        row.tokens = done.tokens[:50]
        kept.append(drafted(index, row) == done.tokens[50:70])
        index.remove(row.slot)
    assert kept == sorted(kept)
    assert 5 < sum(kept) < 15


def test_a_group_without_room_drafts_from_what_it_has():
    index = SiblingIndex(max_bytes=2**16)
    old, new = Row(index, "a", []), Row(index, "b", [])
    rng = np.random.default_rng(0)
    for _ in range(30):
        old.tokens += rng.integers(0, 1000, 100).tolist()
        new.tokens += rng.integers(0, 1000, 10).tolist()
        extend(index, old, new)
        assert 0 < index.num_bytes <= index.max_bytes
    reader, other = Row(index, "a", []), Row(index, "a", [])
    reader.tokens, other.tokens = old.tokens[:300], old.tokens[:2900]
    assert [tokens for tokens, _ in draft(index, reader, other)] == [old.tokens[300:320], []]
    index.remove(new.slot)
    index.max_bytes = 2**20
    extend(index, old)
    assert drafted(index, other) == old.tokens[2900:2920]


def test_groups_that_fill_up_together_grow_one_after_another(monkeypatch):
    monkeypatch.setattr(siblings, "GROWN_TOKENS", 1)
    index = SiblingIndex()
    rows = [Row(index, str(i), []) for i in range(3)]
    rng = np.random.default_rng(0)
    for num_tokens in (700, 100):
        for row in rows:
            row.tokens += rng.integers(0, 1000, num_tokens).tolist()
        extend(index, *rows)
    readers = [Row(index, str(i), []) for i in range(3)]
    for reader, row in zip(readers, rows, strict=True):
        reader.tokens = row.tokens[:750]
    for num_grown in (1, 2, 3):
        sizes = [len(tokens) for tokens, _ in draft(index, *readers)]
        assert sizes == [20] * num_grown + [0] * (3 - num_grown)
        extend(index, *rows)


def test_slots_are_used_again():
    index = SiblingIndex()
    for _ in range(3):
        rows = [Row(index, str(i % 40), [1, 2, i]) for i in range(100)]
        assert len({row.slot for row in rows}) == 100
        assert max(row.slot for row in rows) < 128
        extend(index, *rows)
        for row in rows:
            index.remove(row.slot)
        for i in range(40):
            index.forget(str(i))
        assert index.num_bytes == 0


def test_rows_that_cannot_be_are_passed_over():
    """Skip slots that are unknown or removed, and read no tokens beyond the array."""
    index = SiblingIndex(min_match=1)
    gone, one = Row(index, "a", []), Row(index, "a", [])
    index.remove(gone.slot)
    slots = np.array([-7, 10**6, gone.slot, one.slot], np.int32)
    token_ids, num_tokens = np.ones((4, 5), np.int32), np.full(4, 99, np.int32)
    index.extend(slots, token_ids, num_tokens)
    drafts, windows = np.zeros((4, 2), np.int32), np.full(4, 99, np.int32)
    assert index.draft(slots, token_ids, num_tokens, windows, drafts).tolist() == [0, 0, 0, 1]
