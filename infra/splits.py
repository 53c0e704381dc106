"""Disjoint splits of problems that are drawn without end."""

import hashlib
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol, TypeVar

SPLITS = ("train", "validation", "corpus")
BUCKETS = 16


class Drawn(Hashable, Protocol):
    """A problem; equal ones have equal hashes."""

    @property
    def prompt(self) -> str: ...


AnyDrawn = TypeVar("AnyDrawn", bound=Drawn)


def split_of(prompt: str) -> str:
    """The only split that a problem may appear in, by a hash of its prompt: splits are disjoint by
    construction."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return SPLITS[min(digest[0] % BUCKETS, len(SPLITS) - 1)]


def draw_distinct(split: str, draw: Callable[[], AnyDrawn]) -> Iterator[AnyDrawn]:
    """Distinct problems of one split, without end."""
    seen: set[AnyDrawn] = set()
    while True:
        problem = draw()
        if split_of(problem.prompt) == split and problem not in seen:
            seen.add(problem)
            yield problem
