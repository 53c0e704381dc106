"""Proposals of techniques to the controller. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engines.control.effects import Effects, WeighedMove
from engines.control.state import StepState
from engines.rollout.moves import RolloutView


@dataclass(frozen=True, slots=True)
class Proposal:
    """Moves that belong together."""

    technique: str
    moves: tuple[WeighedMove, ...]
    free: bool = False
    """It costs nobody anything, so that it may be made where no gain is predicted either."""


class MoveTechnique(Protocol):
    """Knows moves of one kind."""

    name: str

    def propose(
        self, view: RolloutView, state: StepState, effects: Effects
    ) -> Sequence[Proposal]: ...

    def note(self, proposal: Proposal) -> None:
        """It was taken."""
        ...
