"""Policies look at a view and decide on moves; the coordinator makes them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from schemas.rollout import RequestId


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine as a policy sees it."""

    engine: int
    progress: Mapping[RequestId, int]
    """Response tokens so far of every unfinished request placed here."""


@dataclass(frozen=True, slots=True)
class RolloutView:
    """A rollout phase as a policy sees it."""

    elapsed_s: float
    engines: tuple[EngineView, ...]
    """Engines that are alive."""
    num_finished: int
    num_rollouts: int

    @property
    def num_tokens(self) -> int:
        """Response tokens so far of all unfinished requests."""
        return sum(sum(engine.progress.values()) for engine in self.engines)


@dataclass(frozen=True, slots=True)
class Migrate:
    """Take an unfinished request from its engine and go on with it on another."""

    id: RequestId
    to_engine: int


Move = Migrate


class Policy(Protocol):
    """Decides; never does."""

    def decide(self, view: RolloutView) -> Sequence[Move]: ...
