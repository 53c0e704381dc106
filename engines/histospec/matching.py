"""Search of an index for the last tokens of a row.

Rows of a batch belong to different prompts. Each prompt has its own index, whose arrays may be
memory-mapped files. `IndexTable` keeps the indexes alive and passes their addresses to the compiled
code, so nothing is copied. Most of the time goes into cache misses. So one read usually rules out
tokens that occur nowhere, and one search usually finds the longest match.

numba compiles this module into `engines.histospec.drafting`, and refreshes its cache only when that
file is newer. After a change here, touch that file.
"""

import numpy as np
from llvmlite import ir
from numba import carray, int64, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from refrain.engines.histospec.bloom_filter import may_contain
from refrain.engines.histospec.index import HistoryIndex

NO_INDEX = -1
FEW = 16
"""Largest number of minimal matches that are extended one by one to find the longest."""
_COLUMNS = 13
_TEXT, _ORDER, _WEIGHT, _TOKENS, _STARTS, _SIEVE = range(6)
N, _NUM_TOKENS, _NUM_STARTS, _NUM_WORDS, MIN, MAX, DRAFT = range(6, _COLUMNS)
"""Columns of a table: addresses of the arrays, their lengths, then the least and largest number of
matching tokens and the longest draft."""


class IndexTable:
    """Indexes that an engine drafts from, by slot."""

    def __init__(self) -> None:
        self._indexes: dict[int, HistoryIndex] = {}
        self._free: list[int] = []
        self.rows = np.zeros((0, _COLUMNS), np.int64)

    def add(self, index: HistoryIndex) -> int:
        """Add an index and return its slot. The slot is valid until `remove`."""
        if not self._free:
            num_taken = len(self.rows)
            self.rows = np.pad(self.rows, ((0, max(16, num_taken)), (0, 0)))
            self._free = list(range(len(self.rows) - 1, num_taken - 1, -1))
        slot = self._free.pop()
        self._indexes[slot] = index
        assert all(array.flags.c_contiguous for array in index.arrays)
        self.rows[slot] = [
            *(array.ctypes.data for array in index.arrays),
            *(len(index.text), len(index.first_tokens), len(index.first_starts), len(index.sieve)),
            *(index.min_match, index.max_match, index.max_draft),
        ]
        return slot

    def remove(self, slot: int) -> None:
        del self._indexes[slot]
        self.rows[slot] = 0
        self._free.append(slot)


@intrinsic
def int32_pointer(typingctx, address):  # noqa: ARG001
    return _pointer(types.int32, address)


@intrinsic
def _int64_pointer(typingctx, address):  # noqa: ARG001
    return _pointer(types.int64, address)


def _pointer(dtype, address):
    signature = types.CPointer(dtype)(address)

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return signature, generate


@intrinsic
def _prefetch(typingctx, address):  # noqa: ARG001
    """Prefetch the memory at this address without waiting for it."""

    def generate(context, builder, signature, args):
        del context, signature
        number = ir.IntType(32)
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(prefetch, [pointer, number(0), number(3), number(1)])

    return types.void(types.int64), generate


@njit(inline="always")
def _int32_array(row, address, length):
    return carray(int32_pointer(row[address]), (row[length],), np.int32)


@njit(inline="always")
def arrays_of(row):
    """Return text, order and weight."""
    weight = carray(_int64_pointer(row[_WEIGHT]), (row[N] + 1,), np.int64)
    return _int32_array(row, _TEXT, N), _int32_array(row, _ORDER, N), weight


@njit(inline="always")
def _compare(text, position, pattern, length):
    """Compare the text from `position` on with the pattern: -1 before, 0 equal, 1 after."""
    for k in range(length):
        token = text[position + k]
        if token != pattern[k]:
            return -1 if token < pattern[k] else 1
    return 0


@njit(inline="always")
def _place_of(tokens, token):
    """Return the position of a token among the distinct ones, or -1. Gallop from where the token
    would be if they were evenly spread, as most of a vocabulary is."""
    n = len(tokens)
    if token < tokens[0] or token > tokens[n - 1]:
        return -1
    spread = max(1, int64(tokens[n - 1]) - tokens[0])
    low = (int64(token) - tokens[0]) * (n - 1) // spread
    high, step = low + 1, 1
    while tokens[low] > token:
        low, high, step = max(0, low - step), low, 2 * step
    step = 1
    while high < n and tokens[high] <= token:
        low, high, step = high, min(n, high + step), 2 * step
    while low + 1 < high:
        middle = (low + high) // 2
        if tokens[middle] <= token:
            low = middle
        else:
            high = middle
    return low if tokens[low] == token else -1


@njit(inline="always")
def _starting_with(row, token):
    """Return the interval of `order` whose suffixes begin with a token, which is not negative."""
    starts = _int32_array(row, _STARTS, _NUM_STARTS)
    place = int64(token) + 1
    if row[_NUM_TOKENS]:
        place = _place_of(_int32_array(row, _TOKENS, _NUM_TOKENS), token)
    if place < 0 or place + 1 >= len(starts):
        return int64(0), int64(0)
    return int64(starts[place]), int64(starts[place + 1])


@njit(inline="always")
def _may_match(row, context, num_tokens):
    """Return whether the last `MIN` tokens may occur."""
    if row[N] == 0 or num_tokens < row[MIN]:
        return False
    words = carray(_int64_pointer(row[_SIEVE]), (row[_NUM_WORDS],), np.int64)
    return may_contain(words, context, num_tokens, row[MIN])


@njit
def first_tokens_of(table, slots, token_ids, num_tokens, windows):
    """Return the interval of `order` that starts with the first of the last `MIN` tokens, for each
    row and each of its indexes; int64 [rows, indexes, 2]. It is empty if the tokens cannot match.

    `slots`: int32 [rows or 1, indexes].

    All rows pass one stage before the next begins. So their cache misses overlap, and later
    searches find their data in the cache.
    """
    num_rows, num_slots = len(windows), slots.shape[1]
    found = np.zeros((num_rows, num_slots, 2), np.int64)
    for i in range(num_rows):
        for k in range(num_slots):
            slot = slots[i % len(slots), k]
            if windows[i] > 0 and slot >= 0:
                found[i, k, 1] = _may_match(table[slot], token_ids[i], num_tokens[i])
    for stage in range(3):
        for i in range(num_rows):
            for k in range(num_slots):
                if found[i, k, 1]:
                    row = table[slots[i % len(slots), k]]
                    if stage == 0:
                        token = token_ids[i, num_tokens[i] - row[MIN]]
                        found[i, k, 0], found[i, k, 1] = _starting_with(row, token)
                    elif found[i, k, 1] - found[i, k, 0] <= 2 * FEW:
                        _bring(row, found[i, k, 0], found[i, k, 1], stage)
    return found


@njit(inline="always")
def _bring(row, low, high, stage):
    """Prefetch the data that a search of this interval reads."""
    if stage == 1:
        _prefetch(row[_WEIGHT] + 8 * low)
        _prefetch(row[_ORDER] + 4 * low)
        _prefetch(row[_ORDER] + 4 * (high - 1))
        return
    order = _int32_array(row, _ORDER, N)
    for j in range(low, high):
        place = row[_TEXT] + 4 * int64(order[j])
        # A longer match begins earlier, mostly in the cache line before.
        _prefetch(place - 4 * (row[MAX] - row[MIN]))
        _prefetch(place)


@njit
def match(row, context, num_tokens, length):
    """Return the interval of `order` whose suffixes begin with the last `length` tokens. `length`
    is at least 1."""
    low, high = _starting_with(row, context[num_tokens - length])
    return _match_within(row, context, num_tokens, length, low, high)


@njit
def _match_within(row, context, num_tokens, length, low, high):
    """Do the same as `match`, within the interval of suffixes that begin with the first of these
    tokens."""
    text, order, _ = arrays_of(row)
    pattern = context[num_tokens - length : num_tokens]
    end = high
    while low < high:
        middle = (low + high) // 2
        if _compare(text, order[middle], pattern, length) < 0:
            low = middle + 1
        else:
            high = middle
    start = low
    if start == end or _compare(text, order[start], pattern, length) != 0:
        return start, start
    # Gallop, then bisect, because most intervals are short.
    step = 1
    while low + step < end and _compare(text, order[low + step], pattern, length) == 0:
        low += step
        step *= 2
    high = min(end, low + step)
    while low + 1 < high:
        middle = (low + high) // 2
        if _compare(text, order[middle], pattern, length) == 0:
            low = middle
        else:
            high = middle
    return start, high


@njit
def match_of(row, context, num_tokens, most, enough):
    """Return the longest match of at most `most` tokens that occurs `enough` times: its length and
    its interval. The caller ensures that a match of `MIN` tokens occurs that often."""
    length = int64(row[MIN])
    low, high = match(row, context, num_tokens, length)
    least = length + 1
    while least <= most:
        middle = (least + most + 1) // 2
        begin, end = match(row, context, num_tokens, middle)
        if end - begin >= enough:
            length, low, high, least = middle, begin, end, middle + 1
        else:
            most = middle - 1
    return length, low, high


@njit
def few_matches():
    """Return buffers for up to `FEW` matches: where each begins, int32 [FEW], prefix sums of
    weights, int64 [FEW + 1], and how many tokens match, int64 [FEW]. The first two take the place
    of `order` and `weight`."""
    return np.zeros(FEW, np.int32), np.zeros(FEW + 1, np.int64), np.zeros(FEW, np.int64)


@njit
def _longest_of(row, low, high, context, num_tokens, length, most, few):
    """Extend a few matches of `length` tokens; return the greatest length, and how many matches
    have it."""
    text, order, weight = arrays_of(row)
    places, sums, lengths = few
    longest, count = length, 0
    for j in range(low, high):
        place, matched = order[j], length
        while matched < most and place > 0 and text[place - 1] == context[num_tokens - matched - 1]:
            place, matched = place - 1, matched + 1
        lengths[j - low] = matched
        if matched > longest:
            longest, count = matched, 0
        if matched == longest:
            places[count] = place
            sums[count + 1] = sums[count] + weight[j + 1] - weight[j]
            count += 1
    return longest, count


@njit
def often_of_few(row, low, high, most, enough, few):
    """Do the same as `match_of` on the few matches that `longest_match` has extended. Return the
    length, and how many matches have it."""
    _, order, weight = arrays_of(row)
    places, sums, lengths = few
    length, least = most, int64(row[MIN])
    while length > least and (lengths[: high - low] >= length).sum() < enough:
        length -= 1
    count = 0
    for j in range(low, high):
        if lengths[j - low] >= length:
            places[count] = order[j] - (length - least)
            sums[count + 1] = sums[count] + weight[j + 1] - weight[j]
            count += 1
    return length, count


@njit
def longest_match(row, context, num_tokens, first, at_least, few):
    """Find the longest match of the last tokens. Return its length, the two ends of its interval,
    whether that interval is of `few` (else of `order`), and the interval of `order` of the shortest
    match. The length is 0 if nothing matches.

    `first`: int64 [2], see `first_tokens_of`.
    `at_least`: length at which the search begins; any value gives the same match.
    `few`: see `few_matches`.
    """
    least, most = row[MIN], min(row[MAX], num_tokens)
    low, high = first
    if low < high:
        low, high = _match_within(row, context, num_tokens, least, low, high)
    fewest = low, high
    if low == high:
        return int64(0), low, high, False, fewest
    if high - low <= FEW:
        matched, count = _longest_of(row, low, high, context, num_tokens, least, most, few)
        return matched, int64(0), int64(count), True, fewest
    # What matches longer also matches shorter, so bisect. The first try is the length to beat.
    matched, length, least = least, most, max(least + 1, at_least)
    while least <= most:
        begin, end = match(row, context, num_tokens, length)
        if begin < end:
            matched, low, high, least = length, begin, end, length + 1
        else:
            most = length - 1
        length = (least + most + 1) // 2
    return matched, low, high, False, fewest
