"""Draft on the device from suffix arrays. `engines.histospec.refill` defines what this computes.

    search    one program per row and index: the longest match of the row's last tokens
    descend   one program per row: draft from the index with the best match

The host waits for nothing. `search` looks for all lengths of a match at once, and for both ends of
each. Each round compares PROBES suffixes per end, so an interval becomes PROBES + 1 times smaller.
A round takes two dependent loads: positions from `order`, then tokens from the text.

The text of a row may lie in host memory, as vLLM's does by default. So `search` reads it once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_TOKENS = 8
"""Largest `max_match`."""
_MOST = tl.constexpr(MOST_TOKENS)
_PROBES = 32
_FEW = 64
"""Largest number of suffixes whose positions `descend` keeps in registers."""
_MISSING = tl.constexpr(-2)
"""Token after the end of a text. It is smaller than all tokens and the -1 that ends a response."""


def refill_on_device(
    arena: Tensor,
    table: Tensor,
    slots: Tensor,
    requests: Tensor,
    num_sampled: Tensor,
    text: Tensor,
    num_tokens: Tensor,
    drafts: Tensor,
    min_match: int,
    max_match: int,
) -> None:
    """Write a draft for each row. Call it on the stream that has written the arguments.

    Args:
        arena: int32 [any], text and order of all indexes.
        table: int64 [slots, 3]: where in the arena an index's text begins, where its order begins,
            and its number of tokens. The last is 0 if the slot has no index.
        slots: int32 [requests, indexes], slots of each request's indexes. Negative ones are left
            out.
        requests: int64 [rows], request of each row.
        num_sampled: int32 [rows]. Rows with 0 get no draft.
        text: int32 [requests, any], prompt and response.
        num_tokens: int32 [requests], how many of `text` are valid.
        drafts: int64 [rows, window], is overwritten. Missing tokens become 0. The window is at most
            the `max_draft` of the indexes, because they are sorted no deeper.
        min_match, max_match: as of the indexes; at most `MOST_TOKENS`.
    """
    assert 1 <= min_match <= max_match <= MOST_TOKENS
    num_rows, window = drafts.shape
    num_indexes = slots.shape[1]
    if num_rows == 0 or window == 0:
        return
    if num_indexes == 0:
        drafts.zero_()
        return
    found = torch.empty((num_rows, num_indexes, 3), dtype=torch.int32, device=drafts.device)
    where = (table.contiguous(), slots, slots.stride(0), num_indexes, requests.contiguous())
    search[(num_rows, num_indexes)](
        arena,
        *where,
        num_sampled.contiguous(),
        text,
        text.stride(0),
        num_tokens,
        found,
        MIN=min_match,
        MAX=max_match,
        ENDS=triton.next_power_of_2(2 * (max_match - min_match + 1)),
        PROBES=_PROBES,
        num_warps=8,
    )
    _draft(arena, where, found, drafts)


def _draft(arena: Tensor, where: tuple, found: Tensor, drafts: Tensor) -> None:
    """Draft from the matches that `search` found, int32 [rows, indexes, 3]."""
    num_rows, window = drafts.shape
    descend[(num_rows,)](
        arena,
        *where,
        found,
        drafts,
        drafts.stride(0),
        window,
        INDEXES=triton.next_power_of_2(found.shape[1]),
        WINDOW=triton.next_power_of_2(window),
        PROBES=_PROBES,
        FEW=_FEW,
        num_warps=1,
    )


@triton.jit
def _index_of(arena_ptr, table_ptr, slot, is_wanted):
    """Return pointers to text and order of an index, and its number of tokens, int32."""
    row_ptr = table_ptr + slot.to(tl.int64) * 3
    text_start = tl.load(row_ptr, mask=is_wanted, other=0)
    order_start = tl.load(row_ptr + 1, mask=is_wanted, other=0)
    num_tokens = tl.load(row_ptr + 2, mask=is_wanted, other=0)
    return arena_ptr + text_start, arena_ptr + order_start, num_tokens.to(tl.int32)


@triton.jit
def _probes(order_ptr, low, high, PROBES: tl.constexpr):
    """Spread probes over intervals; return their distance, [ends], and whether there is a suffix at
    each probe, and its position, both [ends, PROBES]."""
    step = (high - low) // (PROBES + 1) + 1
    probes = low[:, None] + (tl.arange(0, PROBES)[None, :] + 1) * step[:, None] - 1
    is_probe = probes < high[:, None]
    return step, is_probe, tl.load(order_ptr + probes, mask=is_probe, other=0)


@triton.jit
def _narrow(low, high, step, is_before):
    """Return the intervals in which the ends are, if the suffixes of these probes are before."""
    low = low + tl.sum(is_before.to(tl.int32), axis=1) * step
    return low, tl.minimum(low + step - 1, high)


@triton.jit
def _contexts(text_ptr, num_tokens, first, length, MAX: tl.constexpr):
    """Return the last `length` tokens for each end: a tensor [ends] per token. Read no token before
    `first`."""
    columns = tl.arange(0, _MOST)
    at = num_tokens - _MOST + columns
    is_read = (at >= first) & (columns >= _MOST - MAX)
    last = tl.load(text_ptr + at, mask=is_read, other=_MISSING)
    contexts = ()
    for k in tl.static_range(MAX):
        is_token = columns[None, :] == (k - length + _MOST)[:, None]
        token = tl.sum(tl.where(is_token, last[None, :], 0), axis=1)
        contexts += (tl.where(k < length, token, _MISSING),)
    return contexts


@triton.jit
def _compare(text_ptr, num_tokens, position, is_probe, contexts, length, MAX: tl.constexpr):
    """Compare suffixes, [ends, PROBES], with the context of each end: -1 before, 0 equal, 1 after.

    `length`: number of tokens of each context, [ends].
    """
    sign = tl.zeros_like(position)
    for k in tl.static_range(MAX):
        wanted = contexts[k][:, None]
        is_token = is_probe & (position + k < num_tokens) & (k < length)[:, None]
        token = tl.load(text_ptr + position + k, mask=is_token, other=_MISSING)
        differs = tl.where(token < wanted, -1, tl.where(token > wanted, 1, 0))
        sign = tl.where(sign == 0, differs, sign)
    return sign


@triton.jit(do_not_specialize=["slots_stride", "num_indexes", "text_stride"])
def search(
    arena_ptr,
    table_ptr,
    slots_ptr,
    slots_stride,
    num_indexes,
    requests_ptr,
    num_sampled_ptr,
    text_ptr,
    text_stride,
    num_tokens_ptr,
    found_ptr,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    ENDS: tl.constexpr,
    PROBES: tl.constexpr,
):
    """Store the longest match of one row in one index: its length, and its interval of `order`. All
    are 0 if nothing matches."""
    row, index = tl.program_id(0), tl.program_id(1)
    is_row = tl.load(num_sampled_ptr + row) > 0
    request = tl.load(requests_ptr + row, mask=is_row, other=0)
    slot = tl.load(slots_ptr + request * slots_stride + index)
    is_wanted = is_row & (slot >= 0)
    suffixes_ptr, order_ptr, size = _index_of(arena_ptr, table_ptr, slot, is_wanted)
    num_tokens = tl.load(num_tokens_ptr + request)
    # Even ends are those before the suffixes that match, odd ones those after them.
    ends = tl.arange(0, ENDS)
    length = MIN + ends // 2
    length = tl.where(length <= tl.minimum(num_tokens, MAX), length, 0)
    first = tl.where(size > 0, 0, num_tokens)
    contexts = _contexts(text_ptr + request * text_stride, num_tokens, first, length, MAX)
    low = tl.zeros_like(ends)
    high = low + tl.where(length > 0, size, 0)
    largest = size
    while largest > 0:
        step, is_probe, position = _probes(order_ptr, low, high, PROBES)
        sign = _compare(suffixes_ptr, size, position, is_probe, contexts, length, MAX)
        low, high = _narrow(low, high, step, is_probe & (sign < (ends % 2)[:, None]))
        largest = largest // (PROBES + 1)
    start, end = tl.split(tl.reshape(low, [ENDS // 2, 2]))
    lengths = MIN + tl.arange(0, ENDS // 2)
    longest = tl.max(tl.where(start < end, lengths, 0), axis=0)
    is_longest = lengths == longest
    found_ptr += (row * num_indexes + index) * 3
    tl.store(found_ptr, longest)
    tl.store(found_ptr + 1, tl.sum(tl.where(is_longest, start, 0), axis=0))
    tl.store(found_ptr + 2, tl.sum(tl.where(is_longest, end, 0), axis=0))


@triton.jit
def _best(found_ptr, num_indexes, INDEXES: tl.constexpr):
    """Return the first index with the most of the longest matches, then their length and interval.
    The length is 0 if nothing matches."""
    index = tl.arange(0, INDEXES)
    is_index = index < num_indexes
    length = tl.load(found_ptr + index * 3, mask=is_index, other=0)
    start = tl.load(found_ptr + index * 3 + 1, mask=is_index, other=0)
    end = tl.load(found_ptr + index * 3 + 2, mask=is_index, other=0)
    longest = tl.max(length, axis=0)
    num_matches = tl.where(length == longest, end - start, -1)
    best = tl.min(tl.where(num_matches == tl.max(num_matches, axis=0), index, INDEXES), axis=0)
    low = tl.sum(tl.where(index == best, start, 0), axis=0)
    return best, longest, low, tl.sum(tl.where(index == best, end, 0), axis=0)


@triton.jit
def _descend_many(text_ptr, order_ptr, size, low, high, depth, PROBES: tl.constexpr):
    """Return the next token of the middle suffix, and the interval of the suffixes that have it.
    The interval is empty if the token is the end of a response."""
    middle = low + (high - low) // 2
    middle_at = tl.load(order_ptr + middle) + depth
    token = tl.load(text_ptr + middle_at, mask=middle_at < size, other=_MISSING)
    ends = tl.arange(0, 2)
    first, last = tl.where(ends == 0, low, middle + 1), tl.where(ends == 0, middle, high)
    largest = middle - low
    while largest > 0:
        step, is_probe, position = _probes(order_ptr, first, last, PROBES)
        at = position + depth
        tokens = tl.load(text_ptr + at, mask=is_probe & (at < size), other=_MISSING)
        first, last = _narrow(first, last, step, is_probe & (tokens < token + ends[:, None]))
        largest = largest // (PROBES + 1)
    low, high = tl.sum(tl.where(ends == 0, first, 0)), tl.sum(tl.where(ends == 1, first, 0))
    return token, low, tl.where(token < 0, low, high)


@triton.jit
def _descend_few(text_ptr, position, size, low, high, depth, FEW: tl.constexpr):
    """Do the same among few suffixes, whose positions are in registers. It takes one load."""
    suffixes, at = tl.arange(0, FEW), position + depth
    is_left = (suffixes >= low) & (suffixes < high)
    tokens = tl.load(text_ptr + at, mask=is_left & (at < size), other=_MISSING)
    token = tl.sum(tl.where(suffixes == (low + high) // 2, tokens, 0), axis=0)
    is_same = is_left & (tokens == token)
    low = tl.min(tl.where(is_same, suffixes, FEW), axis=0)
    high = tl.max(tl.where(is_same, suffixes + 1, 0), axis=0)
    return token, low, tl.where(token < 0, low, high)


@triton.jit(do_not_specialize=["slots_stride", "num_indexes", "drafts_stride", "window"])
def descend(
    arena_ptr,
    table_ptr,
    slots_ptr,
    slots_stride,
    num_indexes,
    requests_ptr,
    found_ptr,
    drafts_ptr,
    drafts_stride,
    window,
    INDEXES: tl.constexpr,
    WINDOW: tl.constexpr,
    PROBES: tl.constexpr,
    FEW: tl.constexpr,
):
    """Draft for one row what follows its best match."""
    row = tl.program_id(0)
    best, depth, low, high = _best(found_ptr + row * num_indexes * 3, num_indexes, INDEXES)
    is_match = depth > 0
    request = tl.load(requests_ptr + row, mask=is_match, other=0)
    slot = tl.load(slots_ptr + request * slots_stride + best)
    text_ptr, order_ptr, size = _index_of(arena_ptr, table_ptr, slot, is_match)
    columns = tl.arange(0, WINDOW)
    draft = tl.zeros([WINDOW], tl.int32)
    num = 0
    while (num < window) & (high - low > FEW):
        token, low, high = _descend_many(text_ptr, order_ptr, size, low, high, depth + num, PROBES)
        draft = tl.where(columns == num, tl.maximum(token, 0), draft)
        num += 1
    suffixes = tl.arange(0, FEW)
    position = tl.load(order_ptr + low + suffixes, mask=suffixes < high - low, other=0)
    low, high = low - low, high - low
    while (num < window) & (high > low):
        token, low, high = _descend_few(text_ptr, position, size, low, high, depth + num, FEW)
        draft = tl.where(columns == num, tl.maximum(token, 0), draft)
        num += 1
    at = drafts_ptr + row.to(tl.int64) * drafts_stride + columns
    tl.store(at, draft.to(tl.int64), mask=columns < window)
