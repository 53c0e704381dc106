"""Sort the suffixes of a text, as deep as drafting looks, in linear passes."""

import numpy as np
from numba import int32, njit


@njit
def _sort_by_first(rank, num_ranks, by_second, starts, order):
    """Sort by the first half, with a stable counting sort. `by_second` is sorted by the second
    half."""
    starts[: num_ranks + 1] = 0
    for r in rank:
        starts[r + 1] += 1
    for r in range(num_ranks):
        starts[r + 1] += starts[r]
    for i in by_second:
        order[starts[rank[i]]] = i
        starts[rank[i]] += 1


@njit
def _rank_pairs(rank, order, half, new_rank):
    """Rank suffixes by both halves; return the number of ranks. `half` is 0 in the first pass."""
    n = len(rank)
    new_rank[order[0]] = 0
    count = 0
    for j in range(1, n):
        a, b = order[j - 1], order[j]
        same = rank[a] == rank[b]
        if same and half:
            second_a = rank[a + half] if a + half < n else -1
            second_b = rank[b + half] if b + half < n else -1
            same = second_a == second_b
        if not same:
            count += 1
        new_rank[b] = count
    return count + 1


@njit
def _order_by_second(order, length, by_second):
    """Put positions without a second half first, then the others ordered by second half."""
    n = len(order)
    j = 0
    for i in range(n - length, n):
        by_second[j] = i
        j += 1
    for position in order:
        if position >= length:
            by_second[j] = position - length
            j += 1


@njit(int32[::1](int32[::1], int32, int32), cache=True, nogil=True)
def sort_suffixes(ranks: np.ndarray, num_ranks: int, depth: int) -> np.ndarray:
    """Return the positions of `ranks`, sorted by the `depth` ranks from each position on; int32
    [n].

    Uses prefix doubling. `ranks`: int32 [n], in 0..num_ranks - 1. `depth`: at least 1. Suffixes
    that are equal that far are in no particular order.
    """
    n = len(ranks)
    if n == 0:
        return ranks
    rank, new_rank = ranks.copy(), np.empty(n, np.int32)
    order, by_second = np.empty(n, np.int32), np.arange(n).astype(np.int32)
    starts = np.empty(max(num_ranks, n) + 1, np.int32)
    length, count = 1, int(num_ranks)
    while True:
        _sort_by_first(rank, count, by_second, starts, order)
        count = _rank_pairs(rank, order, length // 2, new_rank)
        rank, new_rank = new_rank, rank
        if count == n or length >= depth:
            return order
        _order_by_second(order, length, by_second)
        length *= 2
