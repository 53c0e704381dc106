"""Views and moves: a policy reads a view and returns moves, the coordinator makes them. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from refrain.schemas.rollout import DraftProgress, DraftSetting, RequestId, RolloutRequest


@dataclass(frozen=True, slots=True)
class EngineView:
    """What a policy knows about one engine."""

    engine: int
    progress: Mapping[RequestId, int]
    """Response tokens so far of each unfinished request of this stage here. A raced request is on
    several engines."""
    drafting: Mapping[RequestId, DraftProgress] = field(default_factory=dict)
    """Last reported drafting state of the requests among them that have drafts."""
    tp_degree: int = 1
    node_id: str | None = None
    """Node of the engine. None: unknown."""
    earlier: Mapping[RequestId, int] = field(default_factory=dict)
    """Response tokens so far of each unfinished request of an earlier stage here."""


@dataclass(frozen=True, slots=True)
class RolloutView:
    """What a policy knows about the rollout stage of one step."""

    elapsed_s: float
    engines: tuple[EngineView, ...]
    """Live engines at this stage: not on standby, and not yet at the next step."""
    num_finished: int
    num_rollouts: int
    num_deferrable: int = 0
    """Number of requests that may still be deferred to the next step. Zero while the next step is
    not queued. The other requests fill the batch."""
    waiting: Mapping[RequestId, RolloutRequest] = field(default_factory=dict)
    """Requests in the stage's queue, in order of submission. No engine has them yet."""
    finished: dict[RequestId, int] = field(default_factory=dict)
    """Response tokens of the stage's finished rollouts, in order of their end."""
    goes_on: bool = False
    """Whether the next step is queued, so that engines which end their part can begin it."""
    now_s: float = 0.0
    """Time of the view. The clock is the same for all stages of a run."""

    @property
    def num_tokens(self) -> int:
        """Response tokens so far of all unfinished requests. A raced request counts once."""
        longest: dict[RequestId, int] = {}
        for engine in self.engines:
            for id, num_tokens in engine.progress.items():
                longest[id] = max(num_tokens, longest.get(id, 0))
        return sum(longest.values())


@dataclass(frozen=True, slots=True)
class Start:
    """Give a waiting request to an engine. Ignored when it waits no longer, and when the engine is
    not at this stage."""

    id: RequestId
    to_engine: int


@dataclass(frozen=True, slots=True)
class Migrate:
    """Move an unfinished request to another engine. Ignored while the request is raced."""

    id: RequestId
    to_engine: int


@dataclass(frozen=True, slots=True)
class Defer:
    """Move an unfinished request to the next step, on `to_engine`. Ignored while the request is
    raced."""

    id: RequestId
    to_engine: int


@dataclass(frozen=True, slots=True)
class Close:
    """End the stage: defer all its unfinished requests to the next step, each on its own engine. A
    request that is raced or was deferred before stays, and the stage waits for it."""


@dataclass(frozen=True, slots=True)
class Race:
    """Also generate an unfinished request on another engine of this stage, with these drafts. The
    first copy to finish counts, the others are withdrawn (SpecActor, section 4.2, best-of-N)."""

    id: RequestId
    to_engine: int
    drafting: DraftSetting


@dataclass(frozen=True, slots=True)
class Redraft:
    """Change the drafting setting of an unfinished request on this engine. The request keeps the
    setting when it moves. The coordinator makes all redrafts of a decision before other moves."""

    id: RequestId
    engine: int
    drafting: DraftSetting


@dataclass(frozen=True, slots=True)
class Reshape:
    """Switch a pool to engines of another TP degree, with all its unfinished requests (PAT,
    section 4). The pool returns to its base layout once it has no requests left. If a policy
    returns this from `begin`, the layout becomes the base for this and later stages."""

    pool: int
    tp_degree: int
    move_kv: bool = True
    """Whether to move keys and values along, or recompute them."""


@dataclass(frozen=True, slots=True)
class Concede:
    """Withdraw a raced request from this engine, so that its other copies go on. Ignored for the
    last copy."""

    id: RequestId
    engine: int


Move = Start | Migrate | Defer | Close | Race | Redraft | Reshape | Concede


MovesKV = Callable[[int, int, float], bool]
"""Whether a request that moves within a node takes its keys and values along: TP degree of its
engine and of the other engine, tokens of context (`SwitchCosts.moves_kv`)."""
FIRST_KV_TOKENS = 2048
"""Context from which requests take keys and values along before a prefill has been measured."""


def moves_long(from_tp: int, to_tp: int, context_tokens: float) -> bool:
    """Return whether the context has at least `FIRST_KV_TOKENS` tokens."""
    del from_tp, to_tp
    return context_tokens >= FIRST_KV_TOKENS


class Policy(Protocol):
    """Chooser of moves. A policy has no side effects on engines."""

    def decide(self, view: RolloutView) -> Sequence[Move]: ...


@runtime_checkable
class FirstLayout(Protocol):
    """Policy that also chooses the layout in which each pool begins a stage."""

    def begin(self, view: RolloutView) -> Sequence[Reshape]:
        """Return a `Reshape` for each pool that should begin in another layout than the current
        one. `view`: the queued requests, without tokens; no other stage is under way."""
        ...
