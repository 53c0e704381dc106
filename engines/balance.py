"""Work over engines. Pure."""

import heapq
from collections.abc import Callable, Hashable, Sequence
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


def places_after(place: int, num_before: int, num_after: int) -> range:
    """Places among so many engines of what was at this one among others: what was dealt in turn
    over those is dealt in turn over these."""
    return range(place % num_after, num_after, num_before)


def in_turn(places: Sequence[T]) -> Callable[[Hashable], T]:
    """Gives places to keys, in turn as they come, and to each the same again."""
    given: dict[Hashable, T] = {}
    return lambda key: given.setdefault(key, places[len(given) % len(places)])
