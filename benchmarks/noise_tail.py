"""The largest of very many draws of noise."""

import math

import numpy as np
from numba import float64, int64, njit, types, uint64

from engines.inference.sampling.cpu import gumbel, philox, stream_of

_DRAWS_OF_KEY = 2**18
_SMALL = np.uint64(2**20)
"""First words below are of large noise; of the others it need not be made."""


def tail(num_draws: int, num_expected: int) -> tuple[int, float]:
    """How much noise is beyond that of which so many draws have `num_expected`; the largest.

    Keys, positions and token ids follow each other, as those of a batch do.
    """
    beyond = -math.log(-math.log1p(-num_expected / num_draws))
    return _tail(num_draws // _DRAWS_OF_KEY, beyond)


@njit(types.Tuple((int64, float64))(int64, float64))
def _tail(num_keys, beyond):
    num, largest = 0, -np.inf
    for i in range(num_keys):
        key, second = stream_of(uint64(i // 64), uint64(i % 64))
        for token_id in range(_DRAWS_OF_KEY):
            first, other = philox(key, uint64(token_id), second)
            if first < _SMALL:
                noise = gumbel(first, other)
                num += noise > beyond
                largest = max(largest, noise)
    return num, largest
