"""Proposals of techniques to the controller. None looks at whether its moves pay. Pure.

Reshaping    PAT: more tensor parallelism for a pool (`engines.control.reshaping`)
Racing       SpecActor, Algorithm 3: a freed engine races requests with another drafter
Outliers     HistoPipe: what has outgrown its ranking group leaves it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engines.control.effects import Effects, WeighedMove
from engines.control.state import StepState
from engines.histopipe.migration import Migration
from engines.rollout.moves import Move, Race, RolloutView
from engines.specactor.best_of_n import BestOfN


@dataclass(frozen=True, slots=True)
class Proposal:
    """Moves that belong together."""

    technique: str
    moves: tuple[WeighedMove, ...]
    free: bool = False
    """It costs nobody anything, so that it may be made where no gain is predicted either."""


class MoveTechnique(Protocol):
    """Knows moves of one kind."""

    def propose(
        self, view: RolloutView, state: StepState, effects: Effects
    ) -> Sequence[Proposal]: ...

    def note(self, proposal: Proposal) -> None:
        """It was taken."""
        ...

    def follow(self, view: RolloutView) -> Sequence[Move]:
        """Moves that follow from those that were taken, and cost nobody anything."""
        ...


class Racing:
    """One proposal for each freed engine."""

    def __init__(self, best_of_n: BestOfN) -> None:
        self._best_of_n = best_of_n

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        del effects
        by_engine: dict[int, list[Race]] = {}
        # The others are looked at later.
        for race in self._best_of_n.propose(view, state.rows):
            by_engine.setdefault(race.to_engine, []).append(race)
        return [Proposal("race", tuple(races), free=True) for races in by_engine.values()]

    def note(self, proposal: Proposal) -> None:
        self._best_of_n.note(move for move in proposal.moves if isinstance(move, Race))

    def follow(self, view: RolloutView) -> Sequence[Move]:
        """Requests of which a copy leads leave the engine where they were."""
        return self._best_of_n.concede(view)


class Outliers:
    """HistoPipe's migration, a proposal for each move."""

    def __init__(self, migration: Migration) -> None:
        self._migration = migration
        self._view: RolloutView | None = None

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        del state, effects
        self._view = view
        return [Proposal("outliers", (move,)) for move in self._migration.propose(view)]

    def note(self, proposal: Proposal) -> None:
        assert self._view is not None
        self._migration.note(self._view, proposal.moves)

    def follow(self, view: RolloutView) -> Sequence[Move]:
        """Nothing follows."""
        del view
        return ()
