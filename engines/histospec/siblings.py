"""Texts that still grow draft for each other and for themselves. Pure.

    text:   pages of 64 tokens, those of one response linked both ways; -1 where nothing is yet
    tables: one per length of match: hash of that many tokens -> place of the token after them,
            where they were last seen

A match is stored when the token after it is known. So every match found drafts at least one token,
and no row finds its own end. A row drafts from samples that passed here in an earlier step: of two
that pass in the same step, neither is ahead. A draft follows the page links, which never lead into
another response. Each match is compared with the tokens, so hashes may collide. Each group has its
own array, which doubles when it is full. The compiled code gets the address of the array.
"""

from dataclasses import dataclass, field

import numpy as np
from numba import boolean, carray, int32, int64, njit, void

from refrain.engines.histospec.matching import int32_pointer

NO_SLOT = -1
PAGE = 64  # tokens
GROWN_TOKENS = 2**15
"""Number of tokens moved to larger arrays in one call, after which other groups wait for the next
call. All groups fill up in the same step, and moving a token takes 0.2 us."""
_FIRST_PAGES = 12
"""Three times a power of two, so that tables of a power of two are at most three quarters full."""
_NONE = -1
_GROUP, _START, _TAKEN, _LAST = range(4)
"""Columns of a slot: row of its group, position in the sequence where its text starts, number of
tokens of the sequence stored so far, place of the last stored token."""
_ARRAY, _PAGES, _USED, _WANTED, _MIN, _MAX = range(6)
"""Columns of a group: address of its array, number of pages that exist, are used, and are needed in
addition, least and largest number of matching tokens."""


@dataclass(slots=True)
class _Group:
    row: int
    num_live: int = 0
    forgotten: bool = False
    array: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))


class SiblingIndex:
    """Texts of one engine's running samples, by group. A group without requests is kept, because
    more of its requests may be waiting. It is freed by `forget`, or when its memory is needed."""

    def __init__(self, *, max_match: int = 7, min_match: int = 3, max_bytes: int = 2**30) -> None:
        """A draft needs a match of at least `min_match` tokens; longer matches count up to
        `max_match`. Beyond `max_bytes`, groups without requests are freed, oldest first. If there
        are none, the other groups store nothing more until there is room again."""
        assert 1 <= min_match <= max_match
        assert max_bytes < 2**35, "places are int32"
        self.max_bytes = max_bytes
        self._matches = (min_match, max_match)
        self._groups: dict[str, _Group] = {}
        self._slots: dict[int, str] = {}
        self._group_rows = np.zeros((0, 6), np.int64)
        self._slot_rows = np.zeros((0, 4), np.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes of the groups' arrays."""
        return sum(group.array.nbytes for group in self._groups.values())

    def add(self, group: str, num_prompt_tokens: int) -> int:
        """Add a new request and return its slot. The slot is valid until `remove`."""
        if group not in self._groups:
            self._group_rows, row = _with_free_row(self._group_rows)
            self._group_rows[row] = [0, 0, 0, 0, *self._matches]
            self._groups[group] = _Group(row)
        self._groups[group].num_live += 1
        self._slot_rows, slot = _with_free_row(self._slot_rows)
        start = max(num_prompt_tokens - self._matches[1], 0)
        self._slot_rows[slot] = [self._groups[group].row, start, start, _NONE]
        self._slots[slot] = group
        return slot

    def remove(self, slot: int) -> None:
        """Remove a finished request. Its text stays with the group."""
        name = self._slots.pop(slot)
        self._slot_rows[slot] = _NONE
        group = self._groups[name]
        group.num_live -= 1
        if group.forgotten or not len(group.array):
            self._free_idle(name)

    def forget(self, group: str) -> None:
        """Free the group, at once or when its last request is removed."""
        if group in self._groups:
            self._groups[group].forgotten = True
            self._free_idle(group)

    def extend(self, slots: np.ndarray, token_ids: np.ndarray, num_tokens: np.ndarray) -> None:
        """Store the tokens that are new since the last call.

        `slots`: int32 [rows], `NO_SLOT` where a row has none.
        `token_ids`: int32 [rows, any], prompt and response so far, no token negative.
        `num_tokens`: int32 [rows], how many of `token_ids` are valid.
        """
        assert len(slots) == len(token_ids) == len(num_tokens)
        rows = (self._group_rows, self._slot_rows, slots, token_ids, num_tokens)
        if _extend_batch(*rows):
            self._make_room()
            _extend_batch(*rows)

    def draft(
        self,
        slots: np.ndarray,
        token_ids: np.ndarray,
        num_tokens: np.ndarray,
        windows: np.ndarray,
        drafts: np.ndarray,
        matched: np.ndarray | None = None,
    ) -> np.ndarray:
        """Draft the most recent tokens after the longest match; return int32 [rows], the number of
        tokens drafted for each.

        `slots`, `token_ids`, `num_tokens`: as in `extend`.
        `windows`: int32 [rows], most tokens to draft; 0 drafts nothing.
        `drafts`: int32 [rows, largest window], filled from the left.
        `matched`: int32 [rows], filled with the number of matching tokens; 0 where nothing is
            drafted.
        """
        matched = np.zeros(len(slots), np.int32) if matched is None else matched
        lengths = map(len, (slots, token_ids, num_tokens, windows, drafts, matched))
        assert len(set(lengths)) == 1
        rows = (self._group_rows, self._slot_rows, slots, token_ids, num_tokens)
        return _draft_batch(*rows, windows, drafts, matched)

    def _free_idle(self, name: str) -> None:
        if self._groups[name].num_live == 0:
            self._group_rows[self._groups.pop(name).row] = _NONE

    def _make_room(self) -> None:
        """Grow the groups that need more pages, as far as time and memory allow."""
        num_moved = 0
        # Groups without requests need nothing, and may be freed during the loop.
        for group in [group for group in self._groups.values() if group.num_live]:
            row = self._group_rows[group.row]
            if row[_USED] + row[_WANTED] <= row[_PAGES] or num_moved >= GROWN_TOKENS:
                continue
            num_pages = max(int(row[_PAGES]), _FIRST_PAGES)
            while num_pages < row[_USED] + row[_WANTED]:
                num_pages *= 2
            size = _size(num_pages, *self._matches)
            if self._have_bytes(4 * size - group.array.nbytes):
                old, group.array = group.array, np.full(size, _NONE, np.int32)
                _move(old, row[_PAGES], group.array, num_pages, *self._matches)
                row[[_ARRAY, _PAGES]] = group.array.ctypes.data, num_pages
                num_moved += int(row[_USED]) * PAGE

    def _have_bytes(self, num_bytes: int) -> bool:
        """Return whether this many more bytes are allowed, after freeing groups without
        requests."""
        num_bytes += self.num_bytes
        for name, group in list(self._groups.items()):
            if num_bytes > self.max_bytes and group.num_live == 0:
                num_bytes -= group.array.nbytes
                self._free_idle(name)
        return num_bytes <= self.max_bytes


def _with_free_row(rows: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the rows, with more of them if all are in use, and the number of a free row."""
    if not (rows[:, 0] == _NONE).any():
        rows = np.pad(rows, ((0, max(16, len(rows))), (0, 0)), constant_values=_NONE)
    return rows, int(np.argmax(rows[:, 0] == _NONE))


@njit(int64(int64, int64, int64), cache=True)
def _size(num_pages, min_match, max_match):
    """Return the number of elements of a group's array."""
    return num_pages * (PAGE + 2) + (max_match - min_match + 1) * num_pages * PAGE * 4 // 3


@njit(inline="always")
def _parts(array, num_pages, min_match, max_match):
    """Return the text, the page before each page, the page after, and the tables [lengths,
    cells]."""
    text, back = array[: num_pages * PAGE], array[num_pages * PAGE : num_pages * (PAGE + 1)]
    forth = array[num_pages * (PAGE + 1) : num_pages * (PAGE + 2)]
    shape = (max_match - min_match + 1, num_pages * PAGE * 4 // 3)
    return text, back, forth, array[num_pages * (PAGE + 2) :].reshape(shape)


@njit(inline="always")
def _parts_of(group):
    num_pages, least, most = group[_PAGES], group[_MIN], group[_MAX]
    array = carray(int32_pointer(group[_ARRAY]), (_size(num_pages, least, most),), np.int32)
    return _parts(array, num_pages, least, most)


@njit(inline="always")
def _beside(links, place, step):
    """Return the place of the token before or after; negative where the text starts or its pages
    end."""
    if (place + step) // PAGE == place // PAGE:
        return place + step
    page = int64(links[place // PAGE])
    return page * PAGE + (place + step) % PAGE if page >= 0 else int64(_NONE)


@njit(inline="always")
def _mixed(key, token):
    """Return the hash with one more token."""
    key = (key + token + 1) * int64(0x1E3779B97F4A7C15)
    return key ^ (key >> 29)


@njit
def _follows(text, back, place, tokens, end, length):
    """Return whether the token at `place` follows the `length` tokens before `end`."""
    for i in range(end - 1, end - 1 - length, -1):
        place = _beside(back, place, -1)
        if place < 0 or text[place] != tokens[i]:
            return False
    return True


@njit
def _cell(text, back, table, key, tokens, end, length):
    """Return the cell of the `length` tokens before `end`, an empty one if they are not stored."""
    last = len(table) - 1
    cell = key & last
    while table[cell] >= 0 and not _follows(text, back, table[cell], tokens, end, length):
        cell = (cell + 1) & last
    return cell


@njit(void(int32[::1], int64, int32[::1], int64, int64, int64), cache=True)
def _move(old_array, old_pages, array, num_pages, min_match, max_match):
    """Copy a group into a larger array."""
    old_text, old_back, old_forth, old = _parts(old_array, old_pages, min_match, max_match)
    text, back, forth, tables = _parts(array, num_pages, min_match, max_match)
    text[: len(old_text)], back[:old_pages], forth[:old_pages] = old_text, old_back, old_forth
    last = tables.shape[1] - 1
    for i in range(len(old)):
        for place in old[i][old[i] >= 0]:
            key, before = int64(0), int64(place)
            for _ in range(min_match + i):
                before = _beside(back, before, -1)
                key = _mixed(key, text[before])
            cell = key & last
            while tables[i, cell] >= 0:
                cell = (cell + 1) & last
            tables[i, cell] = place


@njit
def _next_place(group, back, forth, last):
    """Return the place of the text's next token, on a new page if needed."""
    if (last + 1) % PAGE:
        return last + 1
    page = group[_USED]
    group[_USED] += 1
    group[_WANTED] -= 1
    if last >= 0:
        back[page] = last // PAGE
        forth[last // PAGE] = page
    return page * PAGE


@njit
def _take(slot, group, tokens, num_tokens):
    """Store the new tokens of a row, each under the tokens before it."""
    text, back, forth, tables = _parts_of(group)
    for end in range(slot[_TAKEN], num_tokens):
        place = _next_place(group, back, forth, slot[_LAST])
        text[place] = tokens[end]
        slot[_LAST] = place
        key = int64(0)
        for length in range(1, min(group[_MAX], end - slot[_START]) + 1):
            key = _mixed(key, tokens[end - length])
            if length >= group[_MIN]:
                table = tables[length - group[_MIN]]
                table[_cell(text, back, table, key, tokens, end, length)] = place
    slot[_TAKEN] = num_tokens


@njit(inline="always")
def _group_of(slot_rows, slot):
    """Return the row of the group, negative if the slot is of no request."""
    return slot_rows[slot, _GROUP] if 0 <= slot < len(slot_rows) else int64(_NONE)


_ROWS = (int64[:, ::1], int64[:, ::1], int32[::1], int32[:, :], int32[::1])


@njit(boolean(*_ROWS), cache=True)
def _extend_batch(group_rows, slot_rows, slots, token_ids, num_tokens):
    """Store the new tokens of the groups that have enough pages; return whether any group has too
    few."""
    group_rows[:, _WANTED] = 0
    short = False
    # Count the needed pages first, because a group stores all of its rows or none.
    for takes in (False, True):
        for i in range(len(slots)):
            row = _group_of(slot_rows, slots[i])
            if row < 0:
                continue
            group, slot = group_rows[row], slot_rows[slots[i]]
            end = max(slot[_TAKEN], min(num_tokens[i], token_ids.shape[1]))
            if not takes:
                first = slot[_START] + 1
                group[_WANTED] += (end - first) // PAGE - (slot[_TAKEN] - first) // PAGE
            elif group[_USED] + group[_WANTED] <= group[_PAGES]:
                _take(slot, group, token_ids[i], end)
            else:
                short = True
    return short


@njit
def _draft_row(group, tokens, num_tokens, window, draft):
    """Draft for one row into `draft`; return the number of tokens drafted, and the number that
    matched."""
    text, back, forth, tables = _parts_of(group)
    place, matched, key = int64(_NONE), 0, int64(0)
    # What matches longer also matches shorter, so the first miss ends the search.
    for length in range(1, min(group[_MAX], num_tokens) + 1):
        key = _mixed(key, tokens[num_tokens - length])
        if length >= group[_MIN]:
            table = tables[length - group[_MIN]]
            found = int64(table[_cell(text, back, table, key, tokens, num_tokens, length)])
            if found < 0:
                break
            place, matched = found, length
    drafted = 0
    while place >= 0 and drafted < window and text[place] >= 0:
        draft[drafted] = text[place]
        drafted += 1
        place = _beside(forth, place, 1)
    return drafted, matched


@njit(int32[::1](*_ROWS, int32[::1], int32[:, ::1], int32[::1]), cache=True)
def _draft_batch(group_rows, slot_rows, slots, token_ids, num_tokens, windows, drafts, matched):
    num_drafts = np.zeros(len(slots), np.int32)
    matched[:] = 0
    for i in range(len(slots)):
        row = _group_of(slot_rows, slots[i])
        window = min(windows[i], drafts.shape[1])
        if row >= 0 and group_rows[row, _PAGES] > 0 and window > 0:
            end = min(num_tokens[i], token_ids.shape[1])
            group = group_rows[row]
            num_drafts[i], matched[i] = _draft_row(group, token_ids[i], end, window, drafts[i])
    return num_drafts
