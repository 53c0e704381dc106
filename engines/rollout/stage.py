"""The rollout stage of one step, from its queue to its last finished rollout."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from refrain.engines.rollout.moves import MovesKV, Policy, RolloutView, moves_long
from refrain.engines.rollout.races import Races
from refrain.schemas.counts import DraftingCounts, MoveCounts, SwitchCounts
from refrain.schemas.rollout import RequestId, RolloutRequest
from refrain.schemas.step import EngineShare
from refrain.schemas.weights import PolicyWeights

OnFinished = Callable[[Sequence[Any]], Awaitable[None]]
"""Callback that stores finished rollouts and returns when they are durable. It raises `EngineDied`
if their tokens were lost with an engine; the coordinator then generates them again."""
OnProgress = Callable[[RolloutView], None]
Recover = Callable[[Sequence[RolloutRequest]], Awaitable[Sequence[RolloutRequest]]]
"""Callback that returns the requests of a dead engine with the turns that are recorded elsewhere.
Bounded in time."""


@dataclass
class Tally:
    """Running totals of one engine's work for a stage. They become its `EngineShare`."""

    num_rollouts: int = 0
    num_tokens: int = 0
    busy_s: float = 0.0
    """Seconds with unfinished requests of the stage."""
    num_restarts: int = 0
    gone: bool = False
    drafting: DraftingCounts = field(default_factory=DraftingCounts)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a finished stage. Times are of the event loop's clock."""

    shares: tuple[EngineShare, ...]
    started_s: float
    """Time at which the first engine had the weights and began."""
    finished_s: float
    """Time at which the last rollout finished, or was deferred."""
    sync_s: float
    """Longest weight sync of an engine, canary included."""
    canary_error: float | None
    """Largest canary error of the engines that loaded weights. None if no engine had to."""
    deferred: tuple[RequestId, ...]
    carried: tuple[RequestId, ...]
    moves: MoveCounts
    switches: SwitchCounts


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the combined outcome of consecutive stages of one step."""
    shares: dict[int, EngineShare] = {}
    for share in (share for outcome in outcomes for share in outcome.shares):
        before = shares.get(share.engine)
        shares[share.engine] = share if before is None else _joined_share(before, share)
    errors = [one.canary_error for one in outcomes if one.canary_error is not None]
    return Outcome(
        shares=tuple(shares.values()),
        started_s=outcomes[0].started_s,
        finished_s=outcomes[-1].finished_s,
        sync_s=max(outcome.sync_s for outcome in outcomes),
        canary_error=max(errors, default=None),
        deferred=tuple(id for outcome in outcomes for id in outcome.deferred),
        carried=tuple(id for outcome in outcomes for id in outcome.carried),
        moves=sum((outcome.moves for outcome in outcomes), MoveCounts()),
        switches=sum((outcome.switches for outcome in outcomes), SwitchCounts()),
    )


def _joined_share(first: EngineShare, later: EngineShare) -> EngineShare:
    added = ("num_rollouts", "num_tokens", "busy_s", "num_restarts", "drafting")
    sums = {name: getattr(first, name) + getattr(later, name) for name in added}
    return first.model_copy(update=sums | {"gone": first.gone or later.gone})


@dataclass(slots=True, eq=False)
class GenerationStage:
    """Requests of one step: waiting, queued, running, finished or deferred to the next step."""

    number: int
    """Stages are numbered in the order in which they were queued."""
    label: str
    """Display name of the step: `split/step`."""
    weights: PolicyWeights
    queues: dict[int, list[RolloutRequest]]
    """Queued requests by engine. An engine that has begun the stage has no entry."""
    on_finished: OnFinished
    on_progress: OnProgress | None
    policies: Sequence[Policy]
    min_rollouts: int | None
    """Rollouts that must finish in this stage. The other requests may be deferred. None: no request
    is deferred from or to this stage."""
    done: asyncio.Future[Outcome]
    tallies: dict[int, Tally]
    num_rollouts: int
    in_flight: bool = False
    """Whether an engine may begin the next stage with unfinished requests of this one, if that one
    is `in_flight`, too. They go on with its weights."""
    moves_kv: MovesKV = moves_long
    recover: Recover | None = None
    """Called when an engine dies, with its requests that have an environment. None: they go on with
    the tokens that they brought to it."""
    waiting: dict[RequestId, RolloutRequest] = field(default_factory=dict)
    """Requests that no engine has yet. Policies start them (`moves.Start`)."""
    finished: dict[RequestId, int] = field(default_factory=dict)
    """Response tokens of finished rollouts."""
    num_finished: int = 0
    num_migrated: int = 0
    num_migrated_with_kv: int = 0
    num_switches: int = 0
    control_s: list[float] = field(default_factory=list)
    link_bytes_per_s: list[float] = field(default_factory=list)
    """Both as in `SwitchCounts`."""
    opened: bool = False
    """Whether the policies have chosen the layouts in which the stage begins."""
    began_s: float = math.inf
    """Time at which the first engine began."""
    sync_s: float = 0.0
    canary_errors: list[float] = field(default_factory=list)
    deferred: list[RequestId] = field(default_factory=list)
    carried: list[RequestId] = field(default_factory=list)
    races: Races = field(default_factory=Races)

    @property
    def num_unfinished(self) -> int:
        """Requests that are neither finished nor deferred. A raced request counts once."""
        return self.num_rollouts - self.num_finished

    @property
    def moved_kv(self) -> bool:
        """Whether a request has taken keys and values along to an engine of other GPUs."""
        return bool(self.races.num_with_kv or self.num_migrated_with_kv)

    @property
    def num_deferrable(self) -> int:
        return 0 if self.min_rollouts is None else max(0, self.num_rollouts - self.min_rollouts)

    def follows_in_flight(self, stage: "GenerationStage") -> bool:
        """Whether engines at this stage may also generate requests of the given earlier one."""
        return self.in_flight and stage.in_flight and self.number > stage.number

    @property
    def takes_deferred(self) -> bool:
        """Whether requests of the stage before may be deferred to this one."""
        return self.min_rollouts is not None

    def defer_to(self, later: "GenerationStage", request: RolloutRequest) -> RolloutRequest:
        """Defer the request to a later stage, and return it as that stage's request."""
        moved = request.deferred()
        self.deferred.append(request.id)
        self.num_rollouts -= 1
        later.carried.append(moved.id)
        later.num_rollouts += 1
        assert later.min_rollouts is not None
        # Otherwise it could defer as many more of its own, and ever more would wait.
        later.min_rollouts += 1
        return moved

    def outcome(self, now_s: float) -> Outcome:
        began_s = min(self.began_s, now_s)
        return Outcome(
            shares=tuple(EngineShare(engine=i, **vars(own)) for i, own in self.tallies.items()),
            started_s=began_s,
            finished_s=now_s,
            sync_s=self.sync_s,
            canary_error=max(self.canary_errors, default=None),
            deferred=tuple(self.deferred),
            carried=tuple(self.carried),
            switches=SwitchCounts(tuple(self.control_s), tuple(self.link_bytes_per_s)),
            moves=MoveCounts(
                num_migrated=self.num_migrated,
                num_deferred=len(self.deferred),
                num_raced=self.races.num_raced,
                num_raced_with_kv=self.races.num_with_kv,
                num_races_won=self.races.num_won,
                wasted_tokens=self.races.wasted_tokens,
                num_diverged=self.races.num_diverged,
                num_switches=self.num_switches,
            ),
        )
