"""Engines that share GPUs in several layouts."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class Pool:
    """GPUs of one node, in one layout at a time: as many engines of TP degree t as fit (PAT 4.1).

    An engine belongs to one layout of one pool. Engines of the current layout work; the others are
    parked.
    """

    index: int
    engines: Mapping[int, tuple[int, ...]]
    """Engines of each layout, by TP degree."""
    first: int | None = None
    """TP degree in which the first stage begins. None: the lowest."""

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
