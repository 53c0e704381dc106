"""Triton kernels of exact sampling: `draw` reads the logits once, `accept` combines the parts.

The noise equals that of `noise` bit for bit, if Triton fuses no operations (call `draw` with
`enable_fp_fusion=False`). The kernels store neither noise nor scaled logits.

The exact logarithms of the noise would be most of the work. So `draw` orders the tokens by an upper
bound of their scores that needs no logarithm (`_keys`). It computes the exact scores of the first
ones, until the bounds of all others are below the best score. That is one score in most parts.
"""

import math

import triton
import triton.language as tl
from triton import knobs

from refrain.engines.inference.sampling import noise
from refrain.engines.inference.sampling.step_rows import GREEDY_BELOW, REJECTED

_PHILOX_ROUNDS = tl.constexpr(noise.PHILOX_ROUNDS)
_MULTIPLIER, _WEYL = tl.constexpr(noise.PHILOX_MULTIPLIER), tl.constexpr(noise.PHILOX_WEYL)
_MIX_1, _MIX_2 = tl.constexpr(noise.MIX_1), tl.constexpr(noise.MIX_2)
_POSITION = tl.constexpr(noise.POSITION)
_WORD, _NEAR_ONE = tl.constexpr(noise.WORD), tl.constexpr(noise.NEAR_ONE)
_SQRT_HALF_BITS = tl.constexpr(noise.SQRT_HALF_BITS)
_LOG_OF_2_HIGH, _LOG_OF_2_LOW = (tl.constexpr(part) for part in noise.LOG_OF_2)
_SERIES = tl.constexpr(noise.LOG_SERIES)
_2_TO_MINUS_32, _2_TO_MINUS_64 = tl.constexpr(2.0**-32), tl.constexpr(2.0**-64)
_OCTAVE, _PER_LN_2 = tl.constexpr(2.0**23), tl.constexpr(1 / math.log(2))
_BITS_TOO_LOW = tl.constexpr(0.0861)
"""log2(1 + f) is at most this much above f."""
_NONE = tl.constexpr(-(2**31))
"""The key of a token that cannot win."""
_TRIES = tl.constexpr(4)
"""Scores to compute one by one. One part of a thousand of a real model's logits needs more."""
_CLOSE, _CLOSE_SHARE = tl.constexpr(2.0**-12), tl.constexpr(2.0**-18)
"""Room for rounding below the best score, absolutely and as a share of it. The errors of
exponentials are below 2e-5, and those of sums below 2^-22 of them."""
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


if knobs.runtime.interpret:

    @triton.jit
    def _multiply(x, FACTOR: tl.constexpr):
        """Return the high and the low word of the product of two words."""
        return tl.umulhi(x, FACTOR), x * FACTOR

else:

    @triton.jit
    def _multiply(x, FACTOR: tl.constexpr):
        # The compiler would use two instructions.
        return tl.inline_asm_elementwise(
            "{ .reg .b64 p; mul.wide.u32 p, $2, $3; mov.b64 {$1, $0}, p; }",
            "=r,=r,r,r",
            [x, FACTOR],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _philox(key, first, second):
    """Return the two words of Philox's output for a counter of two words. All are uint32."""
    for _ in tl.static_range(_PHILOX_ROUNDS):
        high, low = _multiply(first, _MULTIPLIER)
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


@triton.jit
def _stream(key, position):
    return _mix(_mix(key) + position * _POSITION)


@triton.jit
def _words(stream, ids):
    """Return the two random words of each token id."""
    key = (stream & _WORD).to(tl.uint32)
    return _philox(key, ids.to(tl.uint32), _shift_right(stream, 32).to(tl.uint32))


@triton.jit
def _keys(exponentials, first, BLOCK: tl.constexpr):
    """Return int32 keys that order tokens roughly by score, each with its column in the low bits.

    A score is the logarithm of the exponential over -log(u), plus that of a constant per row. And
    -log(u) is at least x, for u = 1 - x. The bits of a float are its logarithm in units of 2^-23
    octaves, too low by at most `_BITS_TOO_LOW`. So the difference of bits bounds the score.
    """
    bits = exponentials.to(tl.int32, bitcast=True)
    x = first.to(tl.float32).to(tl.int32, bitcast=True)
    return ((bits - x) & -BLOCK) | tl.arange(0, BLOCK)[None, :]


@triton.jit
def _key_of(score, largest, BLOCK: tl.constexpr):
    """Return the key that each token with at least this score exceeds."""
    close = score - _CLOSE - tl.abs(score) * _CLOSE_SHARE
    octaves = (close - largest) * _PER_LN_2 - _BITS_TOO_LOW - 32.0
    return tl.maximum(octaves * _OCTAVE - BLOCK, _NONE).to(tl.int32)


@triton.jit
def _scaled_at(rows, ids):
    """Return the scaled logit of one token of each row.

    `rows`: the logits' address, the offset of each row, the size of the vocabulary, and 1 / T.
    """
    logits_ptr, rows_at, vocab_size, scale = rows
    logits = tl.load(logits_ptr + rows_at + ids, mask=ids < vocab_size, other=float("-inf"))
    return logits.to(tl.float32) * scale


@triton.jit
def _best_of_keys(keys, largest, is_open, rows, stream, BLOCK: tl.constexpr):
    """Return the best score of each open row, its column, and whether the row is still open.

    Compute the scores with the largest keys one by one, until no other key can exceed the best.
    """
    start = tl.program_id(1) * BLOCK
    top = tl.max(keys, axis=1)
    best, column = tl.full(largest.shape, float("-inf"), tl.float32), tl.zeros_like(top)
    tries = 0
    while (tl.max(is_open.to(tl.int32), axis=0) > 0) & (tries < _TRIES):
        at = top & (BLOCK - 1)
        first, second = _words(stream, start + at)
        score = _scaled_at(rows, start + at) + _gumbel(first, second)
        wins = is_open & ((score > best) | ((score == best) & (at < column)))
        best, column = tl.where(wins, score, best), tl.where(wins, at, column)
        keys = tl.where(keys == top[:, None], _NONE, keys)
        top = tl.max(keys, axis=1)
        is_open = is_open & (top > _key_of(best, largest, BLOCK))
        tries += 1
    return best, column, is_open


@triton.jit
def _best(
    candidates,
    sums,
    greedy,
    rows,
    stream,
    ids,
    TRUNCATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return each row's best score and its column.

    The score of a row is its candidate if the row is greedy, else its candidate plus noise. `sums`
    are of `_exponentials`, and `rows` of `_scaled_at`.
    """
    largest, exponentials, total = sums
    # A sum that is not a number means that a logit is infinite or not a number.
    is_number = total == total
    is_open = ~greedy & is_number & (largest > float("-inf"))
    if TRUNCATED:
        is_open = is_open & (tl.max(candidates, axis=1) > float("-inf"))
    if tl.max((is_open | ~(greedy | is_number)).to(tl.int32), axis=0) > 0:
        first, second = _words(stream[:, None], ids)
        keys = _keys(exponentials, first, BLOCK)
        if TRUNCATED:
            keys = tl.where(candidates == float("-inf"), _NONE, keys)
        best, column, is_open = _best_of_keys(keys, largest, is_open, rows, stream, BLOCK)
        is_left = is_open | greedy | ~is_number
        if tl.max(is_left.to(tl.int32), axis=0) > 0:
            scores = candidates + tl.where(greedy[:, None], 0.0, _gumbel(first, second))
            best_left, column_left = tl.max(scores, axis=1, return_indices=True)
            best = tl.where(is_left, best_left, best)
            column = tl.where(is_left, column_left, column)
    else:
        best, column = tl.max(candidates, axis=1, return_indices=True)
    return best, column


@triton.jit
def _exponentials(x):
    """Return the maximum of each row, exp(x - maximum), and the row's sum of it."""
    largest = tl.max(x, axis=1)
    offset = tl.where(largest == float("-inf"), 0.0, largest)
    exponentials = tl.exp(x - offset[:, None])
    return largest, exponentials, tl.sum(exponentials, axis=1)


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
    rows_at, start = rows.to(tl.int64) * stride, tl.program_id(1) * BLOCK
    ids = start + tl.arange(0, BLOCK)[None, :]
    at = rows_at[:, None] + ids
    logits = tl.load(logits_ptr + at, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    scaled, scale, greedy = logits, 1.0, True
    if not GREEDY:
        temperatures = tl.load(temperatures_ptr + requests)
        greedy = temperatures < _GREEDY_BELOW
        scale = tl.div_rn(1.0, tl.where(greedy, 1.0, temperatures))
        scaled = logits * scale[:, None]
    candidates, of_logits = scaled, (logits_ptr, rows_at, vocab_size, scale)
    if TRUNCATED:
        drawn_from = tl.load(drawn_from_ptr + at, mask=ids < vocab_size, other=float("-inf"))
        candidates = tl.where(drawn_from == float("-inf"), float("-inf"), scaled)
    sums = _exponentials(scaled)
    if GREEDY:
        best, column = tl.max(candidates, axis=1, return_indices=True)
    else:
        positions = tl.load(positions_ptr + tl.load(input_rows_ptr + rows) - after) + 1
        stream = _stream(tl.load(keys_ptr + requests), positions)
        best, column = _best(candidates, sums, greedy, of_logits, stream, ids, TRUNCATED, BLOCK)
    chosen = _scaled_at(of_logits, start + column)
    part = rows.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(tokens_ptr + part, start + column, mask=is_row)
    stored = (best, chosen, sums[0], sums[2])
    for i in tl.static_range(4):
        tl.store(parts_ptr + i * size + part, stored[i], mask=is_row)


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
