"""Techniques that take requests to other engines. Pure.

    Racing       SpecActor, Algorithm 3: a freed engine races requests with another drafter
    Spreading    requests of the engine that ends last, to one that is free
    Outliers     HistoPipe: what has outgrown its ranking group leaves it

None looks at whether its moves pay.
"""

from collections.abc import Iterator

from engines.control.effects import Effects
from engines.control.proposal import Proposal
from engines.control.state import Copy, StepState
from engines.histopipe.migration import Migration
from engines.rollout.moves import Migrate, Race, RolloutView
from engines.specactor.best_of_n import BestOfN


class Racing:
    """One proposal for each freed engine."""

    name = "race"

    def __init__(self, best_of_n: BestOfN) -> None:
        self._best_of_n = best_of_n

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        del state, effects
        by_engine: dict[int, list[Race]] = {}
        for race in self._best_of_n.propose(view):
            by_engine.setdefault(race.to_engine, []).append(race)
        return [Proposal(self.name, tuple(races), free=True) for races in by_engine.values()]

    def note(self, proposal: Proposal) -> None:
        self._best_of_n.note(move for move in proposal.moves if isinstance(move, Race))


class Spreading:
    """For each free engine half of the requests of the one that would end last, among those with
    several; every other one by what they have left."""

    name = "spread"

    def __init__(self, max_moved: int = 16) -> None:
        """`max_moved`: requests of one proposal."""
        self._max_moved = max_moved

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        del view, effects
        free = [engine.engine for engine in state.engines.values() if not engine.copies]
        return [
            Proposal(self.name, tuple(Migrate(copy.id, to) for copy in moved))
            for to, moved in zip(sorted(free), self._halves(state), strict=False)
        ]

    def _halves(self, state: StepState) -> Iterator[list[Copy]]:
        last_first = sorted(state.engines, key=lambda i: (-state.engine_end_s(i), i))
        for index in last_first:
            alone = [
                copy for copy in state.engines[index].copies if len(state.holders[copy.row]) == 1
            ]
            alone.sort(key=lambda copy: -copy.remaining_tokens)
            if len(alone) > 1:
                yield alone[1::2][: self._max_moved]

    def note(self, proposal: Proposal) -> None:
        """There is nothing to remember."""


class Outliers:
    """HistoPipe's migration, a proposal for each move."""

    name = "outliers"

    def __init__(self, migration: Migration) -> None:
        self._migration = migration
        self._view: RolloutView | None = None

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        del state, effects
        self._view = view
        return [Proposal(self.name, (move,)) for move in self._migration.propose(view)]

    def note(self, proposal: Proposal) -> None:
        assert self._view is not None
        self._migration.note(self._view, proposal.moves)
