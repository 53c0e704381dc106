"""The noise generator (`engines.inference.sampling.noise`), compiled with numba, without torch.

The CPU sampler uses it, and so do drafters that predict the sampler's noise.
"""

import numpy as np
from numba import njit

from refrain.engines.noise.constants import (
    MIX_1,
    MIX_2,
    PHILOX_MULTIPLIER,
    PHILOX_ROUNDS,
    PHILOX_WEYL,
    POSITION,
)

_MIX_1, _MIX_2, _POSITION = (np.uint64(x % 2**64) for x in (MIX_1, MIX_2, POSITION))
_MULTIPLIER, _WEYL = np.uint64(PHILOX_MULTIPLIER), np.uint64(PHILOX_WEYL)
_WORD, _32 = np.uint64(2**32 - 1), np.uint64(32)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


@njit(inline="always")
def _mix(x):
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    return x ^ (x >> _31)


@njit(inline="always")
def stream_of(sample_key, position):
    """Return the key and the second word of the counter. Arguments and results are uint64."""
    stream = _mix(_mix(sample_key) + position * _POSITION)
    return stream & _WORD, stream >> _32


@njit(inline="always")
def philox(key, first, second):
    """Return the two words of Philox's output. Arguments and results are uint64 below 2^32."""
    for _ in range(PHILOX_ROUNDS):
        product = first * _MULTIPLIER
        first, second = (product >> _32) ^ key ^ second, product & _WORD
        key = (key + _WEYL) & _WORD
    return first, second
