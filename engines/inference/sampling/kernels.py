"""Triton kernels of exact sampling: `draw` reads the logits once, `accept` combines the parts.

The noise equals that of `noise` bit for bit, if Triton fuses no operations (call `draw` with
`enable_fp_fusion=False`). The kernels store neither noise nor scaled logits.

The exact logarithms of the noise would be most of the work. So `draw` bounds the score of each
token from above with the GPU's fast logarithm, which takes a tenth, and computes the exact score of
the best one. If another bound comes close to this score, it computes all scores of the part.
"""

import math

import triton
import triton.language as tl
from triton import knobs

from engines.inference.sampling import noise
from engines.inference.sampling.step_rows import GREEDY_BELOW, REJECTED

_PHILOX_ROUNDS = tl.constexpr(noise.PHILOX_ROUNDS)
_MULTIPLIER, _WEYL = tl.constexpr(noise.PHILOX_MULTIPLIER), tl.constexpr(noise.PHILOX_WEYL)
_MIX_1, _MIX_2 = tl.constexpr(noise.MIX_1), tl.constexpr(noise.MIX_2)
_POSITION = tl.constexpr(noise.POSITION)
_WORD, _NEAR_ONE = tl.constexpr(noise.WORD), tl.constexpr(noise.NEAR_ONE)
_SQRT_HALF_BITS = tl.constexpr(noise.SQRT_HALF_BITS)
_LOG_OF_2_HIGH, _LOG_OF_2_LOW = (tl.constexpr(part) for part in noise.LOG_OF_2)
_SERIES = tl.constexpr(noise.LOG_SERIES)
_2_TO_MINUS_32, _2_TO_MINUS_64 = tl.constexpr(2.0**-32), tl.constexpr(2.0**-64)
_SMALL = tl.constexpr(2**26)
"""First words below this give x below 1/64, where -log(1 - x) is x + x^2 / 2 but for 1e-4 of it."""
_PER_WORD = tl.constexpr(2.0**-32 / math.log(2))
_PER_SQUARE = tl.constexpr(2.0**-65 / math.log(2))
_SMALLEST = tl.constexpr(1e-30)
_LN_2, _LOG2_NOISE = tl.constexpr(math.log(2)), tl.constexpr(-math.log(math.log(2)))
_CLOSE, _CLOSE_SHARE = tl.constexpr(2.0**-10), tl.constexpr(2.0**-18)
"""A bound this close to the best score, absolutely or as a share of it, needs the exact score. The
errors of bounds are below 4e-4, and those of sums below 2^-22 of them."""
_GREEDY_BELOW, _REJECTED = tl.constexpr(GREEDY_BELOW), tl.constexpr(REJECTED)


@triton.jit
def _shift_right(x, BITS: tl.constexpr):
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _mix(x):
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


@triton.jit
def _log_1p(f, square):
    series = f * _SERIES[0] + _SERIES[1]
    for i in tl.static_range(2, 9):
        series = series * f + _SERIES[i]
    return series * f * square


@triton.jit
def _log(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    square = f * f
    scale = exponent.to(tl.float32)
    rest = _log_1p(f, square) + scale * _LOG_OF_2_LOW - square * 0.5
    return f + rest + scale * _LOG_OF_2_HIGH


@triton.jit
def _philox(key, first, second):
    """Return the two words of Philox's output for a counter of two words. All are uint32."""
    for _ in tl.static_range(_PHILOX_ROUNDS):
        high = tl.umulhi(first, _MULTIPLIER)
        low = first * _MULTIPLIER
        first = high ^ key ^ second
        second = low
        key = key + _WEYL
    return first, second


@triton.jit
def _gumbel(first, second):
    """Return the Gumbel noise of two random words."""
    near_one = first < _NEAR_ONE
    high = tl.where(near_one, first, ~first)
    low = tl.where(near_one, second, ~second) | 1
    x = high.to(tl.float32) * _2_TO_MINUS_32 + low.to(tl.float32) * _2_TO_MINUS_64
    square = x * x
    near = x - (_log_1p(-x, square) - square * 0.5)
    return -_log(tl.where(near_one, near, -_log(x)))


if knobs.runtime.interpret:

    @triton.jit
    def _fast_log2(x):
        """Return log2(x) with an error below 1e-6, absolutely or as a share of it."""
        return tl.log2(x)

else:

    @triton.jit
    def _fast_log2(x):
        return tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _gumbel_bound(first):
    """Return an upper bound of the noise with this first word. It may be 4e-4 too low.

    It is too high by less than 4e-4 too, unless the word is among the 2^14 least or largest: there
    the second word counts.
    """
    # -log2(u), for u = 1 - x with x = first / 2^32. The series is for small x.
    x = first.to(tl.float32)
    small = x * (_PER_WORD + x * _PER_SQUARE)
    minus_log2_u = tl.where(first < _SMALL, small, 32.0 - _fast_log2((~first).to(tl.float32) + 1.0))
    return _LOG2_NOISE - _fast_log2(tl.maximum(minus_log2_u, _SMALLEST)) * _LN_2


@triton.jit
def _stream(key, position):
    return _mix(_mix(key) + position * _POSITION)


@triton.jit
def _words(stream, ids):
    """Return the two random words of each token id."""
    key = (stream & _WORD).to(tl.uint32)
    return _philox(key, ids.to(tl.uint32), _shift_right(stream, 32).to(tl.uint32))


@triton.jit
def _pick(values, column, BLOCK: tl.constexpr):
    """Return the value of each row in its column."""
    is_picked = tl.arange(0, BLOCK)[None, :] == column[:, None]
    return tl.sum(tl.where(is_picked, values, 0.0), axis=1)


@triton.jit
def _best(candidates, scaled, greedy, stream, ids, BLOCK: tl.constexpr):
    """Return each row's best score, its column, and the scaled logit there.

    The score of a row is its candidate if the row is greedy, else its candidate plus noise.
    """
    first, second = _words(stream, ids)
    bounds = candidates + tl.where(greedy, 0.0, _gumbel_bound(first))
    bound, column = tl.max(bounds, axis=1, return_indices=True)
    chosen = _pick(scaled, column, BLOCK)
    best_first, best_second = _words(stream, tl.program_id(1) * BLOCK + column[:, None])
    noise = tl.where(greedy, 0.0, _gumbel(best_first, best_second))
    best = tl.where(bound == float("-inf"), bound, chosen + tl.sum(noise, axis=1))
    close = best - _CLOSE - tl.abs(best) * _CLOSE_SHARE
    num_close = tl.sum((bounds >= close[:, None]).to(tl.int32), axis=1)
    # This also holds if no candidate is finite, or one is not a number.
    if tl.max(tl.abs(num_close - 1), axis=0) > 0:
        scores = tl.where(greedy, candidates, candidates + _gumbel(first, second))
        best, column = tl.max(scores, axis=1, return_indices=True)
        chosen = _pick(scaled, column, BLOCK)
    return best, column, chosen


@triton.jit
def _sum_of_exponentials(x):
    """Return the maximum of each row, and the row's sum of exp(x - maximum)."""
    largest = tl.max(x, axis=1)
    offset = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.sum(tl.exp(x - offset[:, None]), axis=1)


@triton.jit
def _request_of(row, ends_ptr, num_requests, num_halvings):
    """Return the request of each row: the first one whose end is after the row."""
    low = tl.zeros_like(row)
    high = low + num_requests - 1
    for _ in range(num_halvings):
        middle = (low + high) // 2
        behind = tl.load(ends_ptr + middle) > row
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, tl.minimum(middle + 1, high))
    return high


# These numbers change from step to step. Without this, Triton would compile again for new values.
@triton.jit(do_not_specialize=["num_rows", "after", "num_requests", "num_halvings", "size"])
def draw(
    logits_ptr,
    drawn_from_ptr,
    stride,
    num_rows,
    vocab_size,
    input_rows_ptr,
    after,
    positions_ptr,
    ends_ptr,
    num_requests,
    num_halvings,
    keys_ptr,
    temperatures_ptr,
    parts_ptr,
    tokens_ptr,
    size,
    RAGGED: tl.constexpr,
    GREEDY: tl.constexpr,
    TRUNCATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce one part of the vocabulary for ROWS rows. Store the best token, its score and its
    scaled logit, and the part's largest scaled logit and sum of exponentials."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    rows = tl.minimum(rows, num_rows - 1)
    requests = rows
    if RAGGED:
        requests = _request_of(rows, ends_ptr, num_requests, num_halvings)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = rows.to(tl.int64)[:, None] * stride + ids
    is_id = ids < vocab_size
    logits = tl.load(logits_ptr + at, mask=is_id, other=float("-inf")).to(tl.float32)
    scaled, greedy = logits, True
    if not GREEDY:
        temperatures = tl.load(temperatures_ptr + requests)
        greedy = (temperatures < _GREEDY_BELOW)[:, None]
        scaled = logits * tl.div_rn(1.0, tl.where(greedy, 1.0, temperatures[:, None]))
    candidates = scaled
    if TRUNCATED:
        drawn_from = tl.load(drawn_from_ptr + at, mask=is_id, other=float("-inf"))
        candidates = tl.where(drawn_from == float("-inf"), float("-inf"), scaled)
    if GREEDY:
        best, column = tl.max(candidates, axis=1, return_indices=True)
        chosen = _pick(scaled, column, BLOCK)
    else:
        positions = tl.load(positions_ptr + tl.load(input_rows_ptr + rows) - after) + 1
        stream = _stream(tl.load(keys_ptr + requests), positions)[:, None]
        best, column, chosen = _best(candidates, scaled, greedy, stream, ids, BLOCK)
    largest, total = _sum_of_exponentials(scaled)
    part = rows.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(tokens_ptr + part, tl.program_id(1) * BLOCK + column, mask=is_row)
    tl.store(parts_ptr + part, best, mask=is_row)
    tl.store(parts_ptr + size + part, chosen, mask=is_row)
    tl.store(parts_ptr + 2 * size + part, largest, mask=is_row)
    tl.store(parts_ptr + 3 * size + part, total, mask=is_row)


@triton.jit(do_not_specialize=["size", "num_requests", "width"])
def accept(
    parts_ptr,
    part_tokens_ptr,
    size,
    num_parts,
    ends_ptr,
    num_requests,
    drafts_ptr,
    tokens_ptr,
    logprobs_ptr,
    width,
    RAGGED: tl.constexpr,
    REQUESTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Combine the parts of REQUESTS requests into tokens and log-probabilities. Emit each request's
    tokens up to the first one that differs from its draft."""
    requests = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)[:, None]
    is_request = requests < num_requests
    first, end = requests, requests + 1
    if RAGGED:
        end = tl.load(ends_ptr + requests, mask=is_request, other=0)
        first = tl.load(ends_ptr + requests - 1, mask=is_request & (requests > 0), other=0)
    columns = tl.arange(0, WIDTH)[None, :]
    rows = first + columns
    is_row = is_request & (rows < end)
    parts = tl.arange(0, PARTS)[None, None, :]
    at = rows.to(tl.int64)[:, :, None] * num_parts + parts
    is_part = is_row[:, :, None] & (parts < num_parts)
    best = tl.load(parts_ptr + at, mask=is_part, other=float("-inf"))
    _, part = tl.max(best, axis=2, return_indices=True)
    is_best = parts == part[:, :, None]
    part_tokens = tl.load(part_tokens_ptr + at, mask=is_part, other=0)
    tokens = tl.sum(tl.where(is_best, part_tokens, 0), axis=2)
    chosen = tl.load(parts_ptr + size + at, mask=is_part, other=0.0)
    chosen = tl.sum(tl.where(is_best, chosen, 0.0), axis=2)
    largest = tl.load(parts_ptr + 2 * size + at, mask=is_part, other=float("-inf"))
    offset = tl.max(largest, axis=2)
    offset = tl.where(offset == float("-inf"), 0.0, offset)
    totals = tl.load(parts_ptr + 3 * size + at, mask=is_part, other=0.0)
    total = tl.sum(totals * tl.exp(largest - offset[:, :, None]), axis=2)
    logprobs = chosen - offset - tl.log(total)
    emitted = is_row
    if RAGGED:
        is_draft = is_request & (rows < end - 1)
        drafts = tl.load(drafts_ptr + rows + 1, mask=is_draft, other=0)
        refuted = tl.min(tl.where(is_draft & (drafts != tokens), columns, WIDTH), axis=1)
        emitted = is_row & (columns <= refuted[:, None])
    at = requests * width + columns
    is_column = is_request & (columns < width)
    tl.store(tokens_ptr + at, tl.where(emitted, tokens, _REJECTED), mask=is_column)
    tl.store(logprobs_ptr + at, tl.where(emitted, logprobs, 0.0), mask=is_column)
