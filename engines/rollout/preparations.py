"""Moves that an engine prepares while it goes on: it copies requests for races, or saves keys and
values of a request that migrates.

    promise ─► order to the origin ─► keep ─► the move, if it is still possible
       └────► drop, when the origin dies

A target with a promise does not begin its next stage. While a request is promised, policies cannot
move it again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from refrain.engines.rollout.moves import Migrate, Race
from refrain.engines.rollout.stage import GenerationStage
from refrain.engines.rollout.tracked_engine import TrackedEngine
from refrain.schemas.rollout import RequestId


@dataclass(frozen=True, slots=True, eq=False)
class Preparation:
    """Moves of requests of one stage from one engine."""

    stage: GenerationStage
    origin: TrackedEngine
    moves: Sequence[Race | Migrate]
    targets: Sequence[TrackedEngine]
    """Target of each move."""


@dataclass(slots=True)
class Preparations:
    """Preparations under way in a fleet."""

    _under_way: list[Preparation] = field(default_factory=list)

    def promise(self, preparation: Preparation) -> None:
        """Note a preparation that begins."""
        self._under_way.append(preparation)
        for target in preparation.targets:
            target.num_promised += 1

    def keep(self, preparation: Preparation) -> bool:
        """Note that a preparation has ended. Return False if it was dropped before."""
        if preparation not in self._under_way:
            return False
        self._under_way.remove(preparation)
        for target in preparation.targets:
            target.num_promised -= 1
        return True

    def drop(self, origin: TrackedEngine) -> list[TrackedEngine]:
        """Forget the preparations of a dead engine. Return their targets."""
        dropped = [one for one in self._under_way if one.origin is origin]
        return [target for one in dropped if self.keep(one) for target in one.targets]

    def of(self, id: RequestId) -> Iterator[Race | Migrate]:
        """Yield the moves of a request that are being prepared."""
        return (move for one in self._under_way for move in one.moves if move.id == id)
