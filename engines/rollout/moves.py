"""Policies look at a view and decide on moves; the coordinator makes them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from schemas.rollout import DraftProgress, DraftSetting, RequestId


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine as a policy sees it."""

    engine: int
    progress: Mapping[RequestId, int]
    """Response tokens so far of every unfinished request of this stage placed here. One that is
    raced is on several engines."""
    drafting: Mapping[RequestId, DraftProgress] = field(default_factory=dict)
    """Drafting of those among them that are drafted for, as far as the engine has told."""
    tp_degree: int = 1
    node_id: str | None = None
    """Node that it is on; None: it is not known."""


@dataclass(frozen=True, slots=True)
class RolloutView:
    """The rollout stage of one step as a policy sees it."""

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
        """Response tokens so far of all unfinished requests; a raced one counts once."""
        longest: dict[RequestId, int] = {}
        for engine in self.engines:
            for id, num_tokens in engine.progress.items():
                longest[id] = max(num_tokens, longest.get(id, 0))
        return sum(longest.values())


@dataclass(frozen=True, slots=True)
class Migrate:
    """Take an unfinished request from its engine and go on with it on another. Not while it is
    raced."""

    id: RequestId
    to_engine: int


@dataclass(frozen=True, slots=True)
class Defer:
    """Take an unfinished request from its engine and go on with it in the next step, there. Not
    while it is raced."""

    id: RequestId
    to_engine: int


@dataclass(frozen=True, slots=True)
class Race:
    """Generate an unfinished request on a further engine of this stage too, drafted for as told.
    The first to finish counts and the others are withdrawn (SpecActor, section 4.2, best-of-N)."""

    id: RequestId
    to_engine: int
    drafting: DraftSetting


@dataclass(frozen=True, slots=True)
class Redraft:
    """Draft differently for an unfinished request on this engine from now on. It keeps the setting
    wherever it goes. Those of one decision are made before its other moves."""

    id: RequestId
    engine: int
    drafting: DraftSetting


@dataclass(frozen=True, slots=True)
class Reshape:
    """Let the GPUs of a pool be engines of another TP degree, and go on there with all unfinished
    requests (PAT, section 4). The pool goes back to where its stages begin once it has nothing left
    to do. Decided before a stage begins: that it and later ones begin there."""

    pool: int
    tp_degree: int
    move_kv: bool = True
    """Move keys and values along; False: compute them again."""


@dataclass(frozen=True, slots=True)
class Concede:
    """Take a raced request from this engine, in favour of its copies elsewhere. Not the last."""

    id: RequestId
    engine: int


Move = Migrate | Defer | Race | Redraft | Reshape | Concede


class Policy(Protocol):
    """Decides; never does."""

    def decide(self, view: RolloutView) -> Sequence[Move]: ...


@runtime_checkable
class Opening(Protocol):
    """Decides in which layout each pool begins a stage, too."""

    def begin(self, view: RolloutView) -> Sequence[Reshape]:
        """Layouts to begin in, where they are not the present ones; `view`: of requests that are
        queued and have no tokens yet, with nothing else under way."""
        ...
