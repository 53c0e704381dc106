"""Noise that is a pure function of (sample key, absolute position, token id), to the last bit.

The token at absolute position n of a sample is `argmax_v(logits_v / T + gumbel(key, n, v))`. Ties
go to the lowest id. This is the Gumbel-max trick: a fair draw from softmax(logits / T). The noise
depends on nothing else: not on the draft, batch, row, engine or device. So a sample has the same
tokens wherever and however it is generated.

The generator is Philox2x32 with seven rounds, the fewest that pass BigCrush (Salmon, Moraes, Dror
and Shaw, SC 2011). It is counter-based. SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) hashes
sample key and position into the generator's key and the high word of its counter. The token id is
the low word. All 64 output bits make one uniform number, so the tail of the noise is right to
2^-64.

The noise is `-log(-log(u))`. The logarithms use only float32 additions and multiplications, each
rounded separately, so all processors agree on the result. All samplers (`cpu`, `gpu`) do these
operations in this order and fuse none of them. Tests compare them with this module.
"""

import torch
from torch import Tensor

from refrain.engines.noise.constants import (
    MIX_1,
    MIX_2,
    PHILOX_MULTIPLIER,
    PHILOX_ROUNDS,
    PHILOX_WEYL,
    POSITION,
    WORD,
)

NEAR_ONE = 1257966796
"""First words below this give u = 1 - x with x below 1 - sqrt(1/2).

For such u we compute log(u) as log(1 + f) with f = -x, which is precise however small x is.
"""
SQRT_HALF_BITS = 0x3F3504F3
"""Bits of sqrt(1/2) as float32."""
LOG_OF_2 = (0.693359375, -2.12194440e-4)
"""log(2), as the sum of two numbers. The first one times an exponent is exact."""
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
"""Coefficients of P, highest power first (logf of Moshier's Cephes library).

log(1 + f) = f - f^2 / 2 + f^3 P(f) for f from sqrt(1/2) - 1 to sqrt(2) - 1.
"""


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift signed 64-bit integers logically (fill with zeros)."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def philox(key: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two words of Philox's output for a counter of two words; int64 below 2^32."""
    for _ in range(PHILOX_ROUNDS):
        product = first * PHILOX_MULTIPLIER
        first, second = _shift_right(product, 32) ^ key ^ second, product & WORD
        key = (key + PHILOX_WEYL) & WORD
    return first, second


def _log_1p(f: Tensor) -> tuple[Tensor, Tensor]:
    """Return f^3 P(f), the part of log(1 + f) beyond f - f^2 / 2, and f^2."""
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
    """Return standard Gumbel noise, float32, from 64 random bits: two words, int64 below 2^32."""
    near_one = first < NEAR_ONE
    high = torch.where(near_one, first, WORD - first)
    low = torch.where(near_one, second, WORD - second) | 1
    x = high.float() * 2.0**-32 + low.float() * 2.0**-64
    rest, square = _log_1p(-x)
    minus_log_u = torch.where(near_one, x - (rest - square * 0.5), -_log(x))
    return -_log(minus_log_u)


def gumbel_noise(sample_keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise for each row and token id.

    Args:
        sample_keys: int64 [rows], see `schemas.keys.sample_key`.
        positions: int64 [rows], absolute position of the token to sample: the number of tokens
            before it, prompt included.
        vocab_size: number of token ids.

    Returns:
        float32 [rows, vocab_size].
    """
    stream = _mix(_mix(sample_keys) + positions * POSITION)[:, None]
    token_ids = torch.arange(vocab_size, device=sample_keys.device)
    return gumbel(*philox(stream & WORD, token_ids, _shift_right(stream, 32)))


def perturbed_argmax(logits: Tensor, sample_keys: Tensor, positions: Tensor) -> Tensor:
    """Draw from softmax(logits) for each row. The same key and position give the same draw.

    Args:
        logits: float32 [rows, vocab], divided by the temperature, -inf for truncated tokens.
        sample_keys, positions: int64 [rows].

    Returns:
        int64 [rows].
    """
    return torch.argmax(logits + gumbel_noise(sample_keys, positions, logits.shape[-1]), dim=-1)
