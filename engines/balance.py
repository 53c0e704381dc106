"""Distribute work over engines. Pure functions."""

import heapq
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")


def longest_first(items: Sequence[T], size: Callable[[T], float], num_shares: int) -> list[list[T]]:
    """Return shares of the items: give each one, largest first, to the smallest share so far.

    Ties go to the first share.
    """
    shares: list[list[T]] = [[] for _ in range(num_shares)]
    loads = [(0.0, share) for share in range(num_shares)]
    for item in sorted(items, key=size, reverse=True):
        load, share = loads[0]
        shares[share].append(item)
        heapq.heapreplace(loads, (load + size(item), share))
    return shares


def places_after(place: int, num_before: int, num_after: int) -> range:
    """Return the new places of items that were at `place`, when the number of engines changes.

    Before, items were dealt in turn over `num_before` engines. After, the same items are dealt in
    turn over `num_after` engines.
    """
    return range(place % num_after, num_after, num_before)


def in_turn(places: Sequence[T]) -> Callable[[Hashable], T]:
    """Return a function that assigns places to keys in turn. A known key keeps its place."""
    given: dict[Hashable, T] = {}
    return lambda key: given.setdefault(key, places[len(given) % len(places)])
