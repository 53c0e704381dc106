"""Sampling on a CPU: one compiled call draws a token for each row, another accepts drafts.

Import this module only after vLLM has started: it uses numba, and vLLM's start on a CPU fails on
some of numba's modules.
"""

import numpy as np
import torch
from llvmlite import ir
from numba import float32, int32, int64, njit, uint32, uint64, void
from numba.extending import intrinsic
from torch import Tensor

from refrain.engines.inference.sampling.noise import (
    LOG_OF_2,
    LOG_SERIES,
    NEAR_ONE,
    SQRT_HALF_BITS,
)
from refrain.engines.inference.sampling.step_rows import GREEDY_BELOW, REJECTED, StepRows
from refrain.engines.noise.generator import philox, stream_of

_BLOCK = 1024
"""Token ids per block. Their scores fit into the L1 cache."""
_HALF, _ONE = np.float32(0.5), np.float32(1.0)
_2_TO_MINUS_32, _2_TO_MINUS_64 = np.float32(2.0**-32), np.float32(2.0**-64)
_LOG_OF_2_HIGH, _LOG_OF_2_LOW = (np.float32(part) for part in LOG_OF_2)
_SERIES = tuple(np.float32(factor) for factor in LOG_SERIES)
_WORD = np.uint64(2**32 - 1)
_NEAR_ONE = np.uint64(NEAR_ONE)


@intrinsic
def _bits_of(typingctx, x):  # noqa: ARG001
    """Reinterpret the bits of a float32 as an int32."""
    return _cast(int32(float32), ir.IntType(32))


@intrinsic
def _float_of(typingctx, bits):  # noqa: ARG001
    """Reinterpret the bits of an int32 as a float32."""
    return _cast(float32(int32), ir.FloatType())


def _cast(signature, to):
    def generate(context, builder, signature, args):  # noqa: ARG001
        return builder.bitcast(args[0], to)

    return signature, generate


@njit(inline="always")
def _log_1p(f, square):
    series = _SERIES[0]
    for i in range(1, len(_SERIES)):
        series = series * f + _SERIES[i]
    return series * f * square


@njit(inline="always")
def _log(x):
    bits = _bits_of(x)
    exponent = (bits - int32(SQRT_HALF_BITS)) >> int32(23)
    f = _float_of(int32(bits - (exponent << int32(23)))) - _ONE  # ty: ignore[unsupported-operator]
    square = f * f
    scale = float32(exponent)
    rest = _log_1p(f, square) + scale * _LOG_OF_2_LOW - square * _HALF
    return f + rest + scale * _LOG_OF_2_HIGH


@njit(inline="always")
def gumbel(first, second):
    """Return Gumbel noise from two random words; see `noise.gumbel`."""
    near_one = first < _NEAR_ONE
    high = first if near_one else _WORD - first
    low = (second if near_one else _WORD - second) | uint64(1)
    x = float32(uint32(high)) * _2_TO_MINUS_32 + float32(uint32(low)) * _2_TO_MINUS_64
    square = x * x
    near = x - (_log_1p(-x, square) - square * _HALF)
    far = -_log(x)
    return -_log(near if near_one else far)


_ROWS = (int32[::1], int64, int64[::1], int32[::1], int64[::1], float32[::1], int64[::1])


@njit(void(float32[:, ::1], *_ROWS, int32[::1], float32[::1], float32[::1]), cache=True)
def _draw(
    logits, input_rows, after, positions, ends, keys, temperatures, columns, tokens, scales, chosen
):
    """Fill in each row's token, inverse temperature and the token's scaled logit.

    `ends`, `temperatures` and `columns` are empty if `StepRows` has None there.
    """
    num_rows, num_columns = logits.shape
    scores = np.empty(min(num_columns, _BLOCK), np.float32)
    request = 0
    for row in range(num_rows):
        if len(ends):
            while row >= ends[request]:
                request += 1
        else:
            request = row
        greedy = len(temperatures) == 0 or temperatures[request] < float32(GREEDY_BELOW)
        scale = _ONE if greedy else _ONE / temperatures[request]
        position = positions[input_rows[row] - after] + 1
        key, second = stream_of(uint64(keys[request]), uint64(position))
        best, column = -np.float32(np.inf), 0
        for start in range(0, num_columns, _BLOCK):
            num = min(_BLOCK, num_columns - start)
            if greedy:
                for i in range(num):
                    scores[i] = logits[row, start + i]
            elif len(columns):
                for i in range(num):
                    high, low = philox(key, uint64(columns[start + i]), second)
                    scores[i] = logits[row, start + i] * scale + gumbel(high, low)
            else:
                for i in range(num):
                    high, low = philox(key, uint64(start + i), second)
                    scores[i] = logits[row, start + i] * scale + gumbel(high, low)
            for i in range(num):
                if scores[i] > best:
                    best, column = scores[i], start + i
        tokens[row] = columns[column] if len(columns) else column
        scales[row], chosen[row] = scale, logits[row, column] * scale


@njit(
    void(int32[::1], float32[::1], int32[::1], int32[::1], int32[:, ::1], float32[:, ::1]),
    cache=True,
)
def _accept(sampled, logprobs, ends, drafts, tokens, token_logprobs):
    row = 0
    for request in range(len(ends)):
        right = True
        for column in range(tokens.shape[1]):
            emitted = right and row < ends[request]
            tokens[request, column] = sampled[row] if emitted else REJECTED
            token_logprobs[request, column] = logprobs[row] if emitted else float32(0.0)
            if emitted:
                right = row + 1 < ends[request] and drafts[row + 1] == sampled[row]
                row += 1
        row = ends[request]


_OUT = (torch.int32, torch.float32, torch.float32)
_NO_ENDS, _NO_TEMPERATURES = np.zeros(0, np.int32), np.zeros(0, np.float32)
_ALL_TOKENS = np.zeros(0, np.int64)


def foresee(drawn_from: Tensor, rows: StepRows) -> Tensor:
    """See `step_rows.Foresee`."""
    return _drawn(drawn_from, rows)[0]


def _drawn(drawn_from: Tensor, rows: StepRows) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's token, inverse temperature and the token's scaled logit."""
    sampled, scales, chosen = (torch.empty(len(drawn_from), dtype=d) for d in _OUT)
    ends = rows.ends.int().numpy() if rows.ends is not None else _NO_ENDS
    temperatures = rows.temperatures.numpy() if rows.temperatures is not None else _NO_TEMPERATURES
    _draw(
        drawn_from.float().contiguous().numpy(),
        rows.input_rows.int().numpy(),
        rows.after,
        rows.positions.numpy(),
        ends,
        rows.keys.numpy(),
        temperatures,
        rows.columns.token_ids.numpy() if rows.columns else _ALL_TOKENS,
        sampled.numpy(),
        scales.numpy(),
        chosen.numpy(),
    )
    return sampled, scales, chosen


def sample(logits: Tensor, drawn_from: Tensor, rows: StepRows) -> tuple[Tensor, Tensor]:
    """See `step_rows.Sample`."""
    sampled, scales, chosen = _drawn(drawn_from, rows)
    logprobs = chosen - torch.logsumexp(logits.float() * scales[:, None], dim=-1)
    if rows.drafts is None:
        return sampled[:, None], logprobs[:, None]
    assert rows.ends is not None
    ends = rows.ends.int().numpy()
    shape = (len(ends), rows.width)
    tokens, token_logprobs = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
    _accept(
        sampled.numpy(),
        logprobs.numpy(),
        ends,
        rows.drafts.int().numpy(),
        tokens.numpy(),
        token_logprobs.numpy(),
    )
    return tokens, token_logprobs
