"""Engines that share the same GPUs, in several layouts."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class Pool:
    """GPUs of one node in one layout at a time: engines of TP degree t, so many as fit (PAT 4.1).

    An engine is in one pool, in one layout of it. Those of the present layout work; the others are
    parked.
    """

    index: int
    engines: Mapping[int, tuple[int, ...]]
    """Engines of each layout, by TP degree."""
    first: int | None = None
    """TP degree in which the first stage begins; None: the lowest."""

    @property
    def base(self) -> int:
        """TP degree in which engines start."""
        return min(self.engines) if self.first is None else self.first

    @property
    def standby(self) -> frozenset[int]:
        """Engines that are parked in the base layout."""
        own = (own for tp_degree, own in self.engines.items() if tp_degree != self.base)
        return frozenset(chain.from_iterable(own))

    @property
    def num_gpus(self) -> int:
        return self.base * len(self.engines[self.base])
