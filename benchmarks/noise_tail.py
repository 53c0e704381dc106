"""The largest noise in a huge number of draws."""

import math

import numpy as np
from numba import float64, int64, njit, types, uint64

from refrain.engines.inference.sampling.cpu import gumbel, philox, stream_of

_DRAWS_OF_KEY = 2**18
_SMALL = np.uint64(2**20)
"""A first word below this gives large noise. Noise of other words need not be computed."""


def tail(num_draws: int, num_expected: int) -> tuple[int, float]:
    """Return how many draws exceed the noise that `num_expected` of them should exceed, and the
    largest noise.

    Keys, positions and token ids are consecutive, as in a batch.
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
