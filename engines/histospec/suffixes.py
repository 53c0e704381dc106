"""Suffixes of a text in sorted order, as far as drafting looks, in linear passes."""

import numpy as np
from numba import int32, njit


@njit(int32[::1](int32[::1], int32, int32), cache=True)
def sort_suffixes(ranks: np.ndarray, num_ranks: int, depth: int) -> np.ndarray:
    """Positions of `ranks` in the order of the `depth` ranks that follow each; prefix doubling.

    Args:
        ranks: int32 [n], in 0..num_ranks - 1.
        depth: at least 1. Suffixes that are the same so far are in no particular order.

    Returns:
        int32 [n].
    """
    n = len(ranks)
    if n == 0:
        return ranks
    rank = ranks.copy()
    order = np.empty(n, np.int32)
    by_second = np.empty(n, np.int32)
    new_rank = np.empty(n, np.int32)
    starts = np.zeros(max(num_ranks, n) + 1, np.int32)

    for i in range(n):
        by_second[i] = i
    length = 1
    count = num_ranks
    while True:
        # Stable counting sort by the first half; the second is in order already.
        starts[: count + 1] = 0
        for i in range(n):
            starts[rank[i] + 1] += 1
        for r in range(count):
            starts[r + 1] += starts[r]
        for j in range(n):
            i = by_second[j]
            order[starts[rank[i]]] = i
            starts[rank[i]] += 1
        half = length // 2
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
        count += 1
        rank, new_rank = new_rank, rank
        if count == n or length >= depth:
            return order
        # Those without a second half come first, then by their second half's order.
        j = 0
        for i in range(n - length, n):
            by_second[j] = i
            j += 1
        for q in range(n):
            i = order[q] - length
            if i >= 0:
                by_second[j] = i
                j += 1
        length *= 2
