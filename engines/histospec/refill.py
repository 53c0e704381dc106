"""Drafts from suffix arrays as a GPU makes them, without rewards and noise. Pure.

The device looks for the last tokens of a request in the prompt's index and in the shared ones, and
drafts what most often followed:

    longest match     an interval of suffixes, in sorted order
    its middle        a suffix that has the majority's next token, if there is a majority
    that token        the part of the interval that has it, and so on

A kernel does this (`engines.inference.drafting.refill_kernel`). This is what it computes.

Tokens of a row are not negative, so a match never crosses the end of a response, and the text ends
with one. Should a row have a negative token, nothing is read after the end of the text.
"""

import numpy as np
from numba import int32, int64, njit

from refrain.engines.histospec.index import END
from refrain.engines.histospec.matching import MAX, MIN, N, arrays_of

MISSING = END - 1


@njit(inline="always")
def _token(text, position):
    """Return a token of the text. After its end, return one that is smaller than all."""
    return text[position] if position < len(text) else MISSING


@njit
def _compare(text, position, context, first, length):
    for k in range(length):
        token, wanted = _token(text, position + k), context[first + k]
        if token != wanted:
            return -1 if token < wanted else 1
    return 0


@njit
def _interval(text, order, context, num_tokens, length):
    """Return the interval of suffixes that begin with the last `length` tokens."""
    first = num_tokens - length
    low, high = int64(0), int64(len(order))
    while low < high:
        middle = (low + high) // 2
        if _compare(text, order[middle], context, first, length) < 0:
            low = middle + 1
        else:
            high = middle
    start, high = low, int64(len(order))
    while low < high:
        middle = (low + high) // 2
        if _compare(text, order[middle], context, first, length) <= 0:
            low = middle + 1
        else:
            high = middle
    return start, low


@njit
def _descend(text, order, low, high, depth, window, draft):
    """Draft what follows the suffixes of an interval, which agree in `depth` tokens."""
    num = 0
    while num < window:
        middle = (low + high) // 2
        token = _token(text, order[middle] + depth)
        if token <= END:
            break
        first, last = low, middle
        while first < last:
            half = (first + last) // 2
            if _token(text, order[half] + depth) < token:
                first = half + 1
            else:
                last = half
        low, first, last = first, middle, high
        while first < last:
            half = (first + last) // 2
            if _token(text, order[half] + depth) <= token:
                first = half + 1
            else:
                last = half
        high = first
        draft[num] = token
        num, depth = num + 1, depth + 1
    return num


@njit(int32[::1](int64[:, ::1], int32[:, :], int32[:, :], int32[::1], int32[::1], int32[:, ::1]))
def refill(table, slots, token_ids, num_tokens, windows, drafts):
    """Draft for every row; return int32 [rows], the number of tokens drafted for each.

    `table`: `IndexTable.rows`.
    `slots`: int32 [rows, any], indexes of each row; negative ones are left out.
    `token_ids`: int32 [rows, any], prompt and response so far.
    `num_tokens`: int32 [rows], how many of `token_ids` are valid.
    `windows`: int32 [rows], most tokens to draft; 0 drafts nothing. At most the indexes'
    `max_draft`, because they are sorted no deeper.
    `drafts`: int32 [rows, largest window], filled from the left.
    """
    num_drafts = np.zeros(len(windows), np.int32)
    for i in range(len(windows)):
        if windows[i] == 0:
            continue
        longest, most, best, begin, end = int64(0), int64(0), int64(-1), int64(0), int64(0)
        for k in range(slots.shape[1]):
            slot = slots[i, k]
            if slot < 0 or table[slot, N] == 0:
                continue
            row = table[slot]
            text, order, _ = arrays_of(row)
            length = min(row[MAX], num_tokens[i])
            while length >= max(row[MIN], longest):
                low, high = _interval(text, order, token_ids[i], num_tokens[i], length)
                if low < high:
                    if length > longest or high - low > most:
                        longest, most, best, begin, end = length, high - low, slot, low, high
                    break
                length -= 1
        if best >= 0:
            text, order, _ = arrays_of(table[best])
            num_drafts[i] = _descend(text, order, begin, end, longest, windows[i], drafts[i])
    return num_drafts
