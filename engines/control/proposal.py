"""Proposals that techniques make to the controller. The controller checks whether they pay. Pure.

Reshaping    PAT: more tensor parallelism for a pool (`engines.control.reshaping`)
Racing       SpecActor, Algorithm 3: a free engine races requests with another drafter
Outliers     HistoPipe: a request that has outgrown its ranking group migrates
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
    """Moves that are made together or not at all."""

    technique: str
    moves: tuple[WeighedMove, ...]
    free: bool = False
    """Whether the moves cost no request anything. They may then be made without a gain."""


class MoveTechnique(Protocol):
    """A technique that proposes moves of one kind."""

    def propose(
        self, view: RolloutView, state: StepState, effects: Effects
    ) -> Sequence[Proposal]: ...

    def note(self, proposal: Proposal) -> None:
        """Record that the controller took the proposal."""
        ...

    def follow(self, view: RolloutView) -> Sequence[Move]:
        """Return free moves that follow from the moves taken earlier."""
        ...


class Racing:
    """The technique that makes one proposal for each free engine."""

    def __init__(self, best_of_n: BestOfN) -> None:
        self._best_of_n = best_of_n

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        del effects
        by_engine: dict[int, list[Race]] = {}
        # `state.rows` leaves out the requests that this round does not look at.
        for race in self._best_of_n.propose(view, state.rows):
            by_engine.setdefault(race.to_engine, []).append(race)
        return [Proposal("race", tuple(races), free=True) for races in by_engine.values()]

    def note(self, proposal: Proposal) -> None:
        self._best_of_n.note(move for move in proposal.moves if isinstance(move, Race))

    def follow(self, view: RolloutView) -> Sequence[Move]:
        """Return moves that withdraw requests from their first engine where a copy is ahead."""
        return self._best_of_n.concede(view)


class Outliers:
    """The technique that makes one proposal for each of HistoPipe's migrations."""

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
        """Return no moves: nothing follows from a migration."""
        del view
        return ()
