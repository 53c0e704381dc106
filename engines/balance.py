"""Work over engines. Pure."""

import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def longest_first(items: Sequence[T], size: Callable[[T], float], num_shares: int) -> list[list[T]]:
    """The largest item first, each to the share that has the least so far; of several, to the
    first."""
    shares: list[list[T]] = [[] for _ in range(num_shares)]
    loads = [(0.0, share) for share in range(num_shares)]
    for item in sorted(items, key=size, reverse=True):
        load, share = loads[0]
        shares[share].append(item)
        heapq.heapreplace(loads, (load + size(item), share))
    return shares
