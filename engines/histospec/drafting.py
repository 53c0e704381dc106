"""Drafts for a whole decoding step in one compiled call.

Rows of a batch belong to different prompts, each with an index of its own whose arrays may be
memory-mapped files. `IndexTable` keeps the indexes alive and hands their addresses to the compiled
code, so nothing is copied.
"""

import numpy as np
from numba import carray, int32, int64, njit, types
from numba.extending import intrinsic

from engines.histospec.index import END, HistoryIndex

NO_INDEX = -1
_COLUMNS = 10
_TEXT, _ORDER, _WEIGHT, _TOKENS, _STARTS, _N, _NUM_TOKENS, _MIN, _MAX, _DRAFT = range(_COLUMNS)


class IndexTable:
    """The indexes that an engine drafts from, by slot."""

    def __init__(self) -> None:
        self._indexes: list[HistoryIndex | None] = []
        self._free: list[int] = []
        self.rows = np.zeros((0, _COLUMNS), np.int64)

    def add(self, index: HistoryIndex) -> int:
        """The slot, until it is removed."""
        if not self._free:
            grown = max(16, 2 * len(self._indexes))
            self._free = list(range(grown - 1, len(self._indexes) - 1, -1))
            self._indexes += [None] * (grown - len(self._indexes))
            rows = np.zeros((grown, _COLUMNS), np.int64)
            rows[: len(self.rows)] = self.rows
            self.rows = rows
        slot = self._free.pop()
        self._indexes[slot] = index
        arrays = (index.text, index.order, index.weight, index.first_tokens, index.first_starts)
        assert all(array.flags.c_contiguous for array in arrays)
        self.rows[slot] = [
            *(array.ctypes.data for array in arrays),
            *(len(index.text), len(index.first_tokens)),
            *(index.min_match, index.max_match, index.max_draft),
        ]
        return slot

    def remove(self, slot: int) -> None:
        self._indexes[slot] = None
        self.rows[slot] = 0
        self._free.append(slot)


@intrinsic
def _int32_pointer(typingctx, address):  # noqa: ARG001
    return _pointer(types.int32, address)


@intrinsic
def _int64_pointer(typingctx, address):  # noqa: ARG001
    return _pointer(types.int64, address)


def _pointer(dtype, address):
    signature = types.CPointer(dtype)(address)

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return signature, generate


@njit(inline="always")
def _compare(text, position, pattern, length):
    """-1, 0 or 1: the text from `position` on is before, like or after the pattern."""
    for k in range(length):
        token = text[position + k]
        if token != pattern[k]:
            return -1 if token < pattern[k] else 1
    return 0


@njit
def _match(text, order, tokens, starts, pattern, length):
    """The interval of `order` whose suffixes begin with the pattern."""
    place = np.searchsorted(tokens, pattern[0])
    if place == len(tokens) or tokens[place] != pattern[0]:
        return 0, 0
    low, high = starts[place], starts[place + 1]
    end = high
    while low < high:
        middle = (low + high) // 2
        if _compare(text, order[middle], pattern, length) < 0:
            low = middle + 1
        else:
            high = middle
    start, high = low, end
    while low < high:
        middle = (low + high) // 2
        if _compare(text, order[middle], pattern, length) <= 0:
            low = middle + 1
        else:
            high = middle
    return start, low


@njit
def _end_of(text, order, low, high, depth):
    """Where the suffixes end whose token at `depth` is that of the first: galloping, then halving,
    as most children are either short or nearly the whole interval."""
    token = text[order[low] + depth]
    if text[order[high - 1] + depth] == token:
        return high
    step = 1
    while low + step < high and text[order[low + step] + depth] == token:
        low += step
        step *= 2
    high = min(high, low + step)
    while low + 1 < high:
        middle = (low + high) // 2
        if text[order[middle] + depth] == token:
            low = middle
        else:
            high = middle
    return high


@njit
def _heaviest(text, order, weight, low, high, depth):
    """The child interval with the largest sum of rewards, then occurrences, then least token."""
    best_low, best_high, best_sum = low, low, int64(-1)
    while low < high:
        end = _end_of(text, order, low, high, depth)
        if text[order[low] + depth] != END:
            total = weight[end] - weight[low]
            if total > best_sum or (total == best_sum and end - low > best_high - best_low):
                best_low, best_high, best_sum = low, end, total
        low = end
    return best_low, best_high


@njit
def _draft_row(row, context, num_tokens, window, draft):
    """Fills `draft`; returns how many tokens it got."""
    n = row[_N]
    if n == 0:
        return 0
    text = carray(_int32_pointer(row[_TEXT]), (n,), np.int32)
    order = carray(_int32_pointer(row[_ORDER]), (n,), np.int32)
    weight = carray(_int64_pointer(row[_WEIGHT]), (n + 1,), np.int64)
    num_first = row[_NUM_TOKENS]
    tokens = carray(_int32_pointer(row[_TOKENS]), (num_first,), np.int32)
    starts = carray(_int32_pointer(row[_STARTS]), (num_first + 1,), np.int32)
    window = min(window, row[_DRAFT])
    for length in range(min(row[_MAX], num_tokens), row[_MIN] - 1, -1):
        pattern = context[num_tokens - length : num_tokens]
        low, high = _match(text, order, tokens, starts, pattern, length)
        drafted = 0
        while drafted < window and low < high:
            depth = length + drafted
            low, high = _heaviest(text, order, weight, low, high, depth)
            if low < high:
                draft[drafted] = text[order[low] + depth]
                drafted += 1
        if drafted:
            return drafted
    return 0


@njit(
    [
        int32[::1](int64[:, ::1], int32[::1], int32[:, :], int32[::1], int32[::1], int32[:, ::1]),
    ],
    cache=True,
)
def draft_batch(table, slots, token_ids, num_tokens, windows, drafts):
    """Draft for every row.

    Args:
        table: `IndexTable.rows`.
        slots: int32 [rows], `NO_INDEX` where there is none.
        token_ids: int32 [rows, any]: prompt and response so far.
        num_tokens: int32 [rows], of them.
        windows: int32 [rows], tokens to draft at most; 0 drafts nothing.
        drafts: int32 [rows, largest window], filled from the left.

    Returns:
        int32 [rows], tokens drafted.
    """
    num_rows = len(slots)
    num_drafts = np.zeros(num_rows, np.int32)
    for i in range(num_rows):
        if slots[i] >= 0 and windows[i] > 0:
            num_drafts[i] = _draft_row(
                table[slots[i]], token_ids[i], num_tokens[i], windows[i], drafts[i]
            )
    return num_drafts
