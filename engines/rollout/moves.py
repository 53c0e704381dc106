"""Policies look at a view and decide on moves; the coordinator makes them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from schemas.rollout import DraftProgress, DraftSetting, RequestId


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine as a policy sees it."""

    engine: int
    progress: Mapping[RequestId, int]
    """Response tokens so far of every unfinished request of this phase placed here. One that is
    raced is on several engines."""
    drafting: Mapping[RequestId, DraftProgress] = field(default_factory=dict)
    """Of those among them that are drafted for, as far as the engine has told."""


@dataclass(frozen=True, slots=True)
class RolloutView:
    """The rollout phase of one step as a policy sees it."""

    elapsed_s: float
    engines: tuple[EngineView, ...]
    """Engines that are alive and not yet at the work of another step."""
    num_finished: int
    num_rollouts: int
    num_deferrable: int = 0
    """Requests that may still be deferred: the others fill the batch, and the next step is there
    to take them."""

    @property
    def num_tokens(self) -> int:
        """Response tokens so far of all unfinished requests."""
        return sum(sum(engine.progress.values()) for engine in self.engines)


@dataclass(frozen=True, slots=True)
class Migrate:
    """Take an unfinished request from its engine and go on with it on another."""

    id: RequestId
    to_engine: int


@dataclass(frozen=True, slots=True)
class Defer:
    """Take an unfinished request from its engine and go on with it in the next step, there."""

    id: RequestId
    to_engine: int


@dataclass(frozen=True, slots=True)
class Race:
    """Generate an unfinished request on a further engine too, with another drafter. The first to
    finish counts and the others are withdrawn (SpecActor, section 4.2, best-of-N)."""

    id: RequestId
    to_engine: int
    drafting: DraftSetting


@dataclass(frozen=True, slots=True)
class Redraft:
    """Draft differently for an unfinished request on this engine from now on."""

    id: RequestId
    engine: int
    drafting: DraftSetting


Move = Migrate | Defer | Race | Redraft


class Policy(Protocol):
    """Decides; never does."""

    def decide(self, view: RolloutView) -> Sequence[Move]: ...
