"""Bloom filter of the runs of `min_match` tokens in a text. One read rules out most missing runs.

Most runs that a row looks up are not in the index, and a search needs a dozen cache misses to find
that out. Each run sets two bits of one word. If either bit is unset, the run occurs nowhere.
"""

import numpy as np
from numba import int32, int64, njit

from refrain.engines.histospec.index import END

_BITS = 3
"""Bits for each token of the text. If seven of ten tokens repeat others, the filter passes 1 in 20
of the runs that do not occur."""


@njit(inline="always")
def _place_and_bits(words, tokens, end, length):
    """Return the word for the `length` tokens before `end`, by position, and their bits in it."""
    key = int64(0)
    for i in range(end - length, end):
        key = (key + tokens[i] + 1) * int64(0x1E3779B97F4A7C15)
        key ^= key >> 29
    place = (((key >> 20) & 0x7FFFFFFF) * len(words)) >> 31
    return place, (int64(1) << (key & 63)) | (int64(1) << ((key >> 6) & 63))


@njit(inline="always")
def may_contain(words, tokens, end, length):
    """Return whether the `length` tokens before `end` may occur. If False, they do not."""
    place, bits = _place_and_bits(words, tokens, end, length)
    return words[place] & bits == bits


@njit(int64[::1](int32[::1], int64), cache=True, nogil=True)
def build_filter(text: np.ndarray, length: int) -> np.ndarray:
    """Return the filter for the runs of `length` tokens of a text; int64 [any]. No run crosses an
    end."""
    words = np.zeros(len(text) * _BITS // 64 + 1, np.int64)
    since_end = 0
    for i in range(len(text)):
        since_end = 0 if text[i] == END else since_end + 1
        if since_end >= length:
            place, bits = _place_and_bits(words, text, i + 1, length)
            words[place] |= bits
    return words
