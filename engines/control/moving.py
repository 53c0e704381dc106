"""Techniques that take requests to other engines. Pure.

    Racing       SpecActor, Algorithm 3: a freed engine races requests with another drafter
    Outliers     HistoPipe: what has outgrown its ranking group leaves it

None looks at whether its moves pay.
"""

from engines.control.effects import Effects
from engines.control.proposal import Proposal
from engines.control.state import StepState
from engines.histopipe.migration import Migration
from engines.rollout.moves import Race, RolloutView
from engines.specactor.best_of_n import BestOfN


class Racing:
    """One proposal for each freed engine."""

    name = "race"

    def __init__(self, best_of_n: BestOfN) -> None:
        self._best_of_n = best_of_n

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        del effects
        by_engine: dict[int, list[Race]] = {}
        for race in self._best_of_n.propose(view):
            # The others are looked at later.
            if race.id in state.rows:
                by_engine.setdefault(race.to_engine, []).append(race)
        return [Proposal(self.name, tuple(races), free=True) for races in by_engine.values()]

    def note(self, proposal: Proposal) -> None:
        self._best_of_n.note(move for move in proposal.moves if isinstance(move, Race))


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
