"""Noise that is a pure function of (sample key, absolute position, token id), to the last bit.

The token at absolute position n of a sample is `argmax_v(logits_v / T + gumbel(key, n, v))`, the
lowest id among equals (the Gumbel-max trick: a fair draw from softmax(logits / T)). Nothing else
enters: not the draft, the batch, the row, the engine or the device. So a sample is the same one
wherever and however it is generated.

The generator is Philox2x32 of seven rounds, the fewest that pass BigCrush (Salmon, Moraes, Dror and
Shaw, SC 2011), addressed by counter. Its key and the high word of its counter are a hash of sample
key and position by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), the low word is the token id.
All 64 bits it yields make one uniform number, so that the tail of the noise is right to 2^-64.

The noise is `-log(-log(u))`, with logarithms that are made of additions and multiplications in
float32, each rounded on its own: no processor has another opinion of them. Whatever draws samples
(`cpu`, `gpu`) does these operations in this order, and fuses none of them. This module is what they
are tested against.
"""

import torch
from torch import Tensor

from engines.inference.sampling.constants import (
    MIX_1,
    MIX_2,
    PHILOX_MULTIPLIER,
    PHILOX_ROUNDS,
    PHILOX_WEYL,
    POSITION,
    WORD,
)

NEAR_ONE = 1257966796
"""First word of the largest u that is 1 - x with x below 1 - sqrt(1/2): there log(u) is taken of
-x, which loses nothing however small x is."""
SQRT_HALF_BITS = 0x3F3504F3
"""sqrt(1/2) as float32."""
LOG_OF_2 = (0.693359375, -2.12194440e-4)
"""Their sum; the first one times an exponent is exact."""
LOG_SERIES = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
"""log(1 + f) = f - f^2 / 2 + f^3 P(f) from sqrt(1/2) - 1 to sqrt(2) - 1: P, highest power first
(Moshier's Cephes library, logf)."""


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of signed 64-bit integers."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def philox(key: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both words of the generator's output for a counter of two words; int64 below 2^32."""
    for _ in range(PHILOX_ROUNDS):
        product = first * PHILOX_MULTIPLIER
        first, second = _shift_right(product, 32) ^ key ^ second, product & WORD
        key = (key + PHILOX_WEYL) & WORD
    return first, second


def _log_1p(f: Tensor) -> tuple[Tensor, Tensor]:
    """log(1 + f) but for -f^2 / 2 and f itself, and f^2."""
    square = f * f
    series = torch.full_like(f, LOG_SERIES[0])
    for factor in LOG_SERIES[1:]:
        series = series * f + factor
    return series * f * square, square


def _log(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    rest, square = _log_1p(f)
    scale = exponent.float()
    return f + (rest + scale * LOG_OF_2[1] - square * 0.5) + scale * LOG_OF_2[0]


def gumbel(first: Tensor, second: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, of 64 bits in two words, int64 below 2^32."""
    near_one = first < NEAR_ONE
    high = torch.where(near_one, first, WORD - first)
    low = torch.where(near_one, second, WORD - second) | 1
    x = high.float() * 2.0**-32 + low.float() * 2.0**-64
    rest, square = _log_1p(-x)
    minus_log_u = torch.where(near_one, x - (rest - square * 0.5), -_log(x))
    return -_log(minus_log_u)


def gumbel_noise(sample_keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise.

    Args:
        sample_keys: int64 [rows], see `schemas.keys.sample_key`.
        positions: int64 [rows], absolute position of the token to be sampled: the number of
            tokens before it, prompt included.
        vocab_size: number of token ids.

    Returns:
        float32 [rows, vocab_size].
    """
    stream = _mix(_mix(sample_keys) + positions * POSITION)[:, None]
    token_ids = torch.arange(vocab_size, device=sample_keys.device)
    return gumbel(*philox(stream & WORD, token_ids, _shift_right(stream, 32)))


def perturbed_argmax(logits: Tensor, sample_keys: Tensor, positions: Tensor) -> Tensor:
    """A fair draw from softmax(logits) of every row, the same one for the same key and position.

    Args:
        logits: float32 [rows, vocab], divided by the temperature, -inf where truncated.
        sample_keys, positions: int64 [rows].

    Returns:
        int64 [rows].
    """
    return torch.argmax(logits + gumbel_noise(sample_keys, positions, logits.shape[-1]), dim=-1)
