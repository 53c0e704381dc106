"""Disjoint splits of randomly drawn problems."""

import hashlib
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol, TypeVar

SPLITS = ("train", "validation", "corpus")
BUCKETS = 16


class Drawn(Hashable, Protocol):
    """A problem. Equal problems have equal hashes."""

    @property
    def prompt(self) -> str: ...


AnyDrawn = TypeVar("AnyDrawn", bound=Drawn)


def split_of(prompt: str) -> str:
    """Return the only split that may have this problem. It follows from a hash of the prompt, so
    splits are disjoint."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return SPLITS[min(digest[0] % BUCKETS, len(SPLITS) - 1)]


def draw_distinct(split: str, draw: Callable[[], AnyDrawn]) -> Iterator[AnyDrawn]:
    """Yield distinct problems of one split, without end."""
    seen: set[AnyDrawn] = set()
    while True:
        problem = draw()
        if split_of(problem.prompt) == split and problem not in seen:
            seen.add(problem)
            yield problem
