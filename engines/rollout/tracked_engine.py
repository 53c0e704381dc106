"""One engine as the coordinator sees it: what it works on, and what it did when.

A call that finds the engine dead raises nothing here: the engine's pump meets the same death and
reports it. Meanwhile its requests stay among the unfinished, from where they are rescued.

The coordinator's record of a request is the one that counts; from an engine comes only what was
generated, and where its keys and values are saved. So a setting for its drafting goes with the
request, wherever that goes; saved keys and values go with it to its next engine and no further.

While the trainer has the GPUs, all engines are on standby.

What it is there for is its `Lifecycle`, which goes these ways alone. A death does not change which
layout has the GPUs, and they may change hands before the engine is there again.

    SERVING, ENTERING ── enter ────► ENTERING ────────── serve ──────────► SERVING
    SERVING, ENTERING ── stand_by ─► STANDBY ─────────── leave_standby ──► ENTERING
    SERVING, ENTERING ── die ──────► DEAD ────────────── revive ─────────► SERVING
    STANDBY ──────────── die ──────► DEAD_ON_STANDBY ─── revive ─────────► STANDBY
    DEAD ─────────────── stand_by ─► DEAD_ON_STANDBY ─── leave_standby ──► DEAD
    DEAD, DEAD_ON_STANDBY ── lose ─► GONE, whatever becomes of its layout
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from math import inf

from engines.rollout.interface import Engine, EngineDied, EngineEvents
from engines.rollout.moves import EngineView
from engines.rollout.stage import GenerationStage, Tally
from schemas.counts import KVCounts
from schemas.rollout import DraftProgress, DraftSetting, RequestId, RolloutRequest
from schemas.timeline import Activity, Span

Fetch = Callable[[Sequence[RequestId]], Awaitable[list[RolloutRequest]]]


class Lifecycle(Enum):
    """States of an engine in a run."""

    SERVING = "serving"
    """Has its GPUs and weights: a request that is submitted starts now."""
    ENTERING = "entering"
    """Wakes, or takes the weights of its stage; requests wait."""
    STANDBY = "standby"
    """Has left its GPUs to another layout or to the trainer: its engine is parked or asleep, or
    about to be."""
    DEAD = "dead"
    """Is being restarted; requests wait, or are rescued."""
    DEAD_ON_STANDBY = "dead on standby"
    """Is being restarted, while another layout has its GPUs."""
    GONE = "gone"
    """Has no place in the cluster any more: its requests are others'."""


_SERVING, _ENTERING, _STANDBY, _DEAD, _DEAD_ON_STANDBY, _GONE = Lifecycle


@dataclass(slots=True, eq=False)
class TrackedEngine:
    """An engine with its queue of sub-batches (RhymeRL, section 4.2).

    It works on one stage at a time and goes to the next when it has nothing left, so all that is
    on it was submitted under one policy version.
    """

    engine: Engine
    lifecycle: Lifecycle = Lifecycle.SERVING
    holds_gpus: bool = False
    """Whether it has the memory of its GPUs, whoever they are meant for."""
    version: int | None = None
    """Policy version of its weights; None when it has none."""
    stage: GenerationStage | None = None
    """Stage that it works on, or did last."""
    waiting: deque[GenerationStage] = field(default_factory=deque)
    """Stages to come."""
    mates: "Sequence[TrackedEngine]" = ()
    """Engines on the same GPUs in other layouts."""
    unfinished: dict[RequestId, RolloutRequest] = field(default_factory=dict)
    """Requests of its stage that it has not finished."""
    finishing: set[RequestId] = field(default_factory=set)
    """Unfinished requests that could not be withdrawn when it went on standby: its engine had
    finished them and will say so, or is dead."""
    progress: Mapping[RequestId, int] = field(default_factory=dict)
    drafting: Mapping[RequestId, DraftProgress] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    """Spans of its activities, on the event loop's clock."""
    woken_s: float = -inf
    """Time at which it last had taken its GPUs."""
    seen: EngineView | None = None
    """The last view of it; None once something has changed, so that one event among hundreds of
    engines costs one new view."""

    @property
    def index(self) -> int:
        return self.engine.index

    @property
    def tally(self) -> Tally:
        assert self.stage is not None
        return self.stage.tallies[self.index]

    @property
    def alive(self) -> bool:
        return self.lifecycle in (Lifecycle.SERVING, Lifecycle.ENTERING, Lifecycle.STANDBY)

    @property
    def gone(self) -> bool:
        return self.lifecycle is Lifecycle.GONE

    @property
    def standby(self) -> bool:
        """Whether another layout has its GPUs. What it has unfinished had finished when it was to
        leave."""
        return self.lifecycle in (Lifecycle.STANDBY, Lifecycle.DEAD_ON_STANDBY)

    @property
    def entering(self) -> bool:
        return self.lifecycle is Lifecycle.ENTERING

    @property
    def free(self) -> bool:
        """Whether it could begin the next stage."""
        return self.takes_requests and not self.unfinished and not self.waits_for_mates

    @property
    def waits_for_mates(self) -> bool:
        """Whether a layout that has left its GPUs has yet to say what it finished."""
        return any(mate.standby and mate.unfinished for mate in self.mates)

    @property
    def takes_requests(self) -> bool:
        """Whether a request that is submitted now starts now."""
        return self.lifecycle is Lifecycle.SERVING

    @property
    def label(self) -> str:
        return self.stage.label if self.stage else ""

    def is_at(self, stage: GenerationStage) -> bool:
        """Whether it works on the stage, or waits for another since it ended its part."""
        return self.alive and not self.standby and self.stage is stage

    def may_serve(self, stage: GenerationStage) -> bool:
        """Whether it is at the stage, or has yet to come to it."""
        here = self.stage is stage and not self.standby
        return not self.gone and (here or self.index in stage.queues)

    def expect(self, requests: Iterable[RolloutRequest]) -> None:
        self.unfinished.update((request.id, request) for request in requests)
        self.seen = None

    def forget(self, id: RequestId) -> RolloutRequest | None:
        """Drop a request and return it; None when it had no such request."""
        self.seen = None
        self.finishing.discard(id)
        found = self.unfinished.pop(id, None)
        if not self.unfinished and self.takes_requests:
            self.rest()
        return found

    def leave_unfinished(self) -> list[RolloutRequest]:
        """All its requests, for others."""
        left = list(self.unfinished.values())
        self.unfinished, self.seen = {}, None
        return left

    def hear(self, events: EngineEvents) -> None:
        """Take in what its engine tells; what is told of requests that are not here, or no more, is
        not seen."""
        self.progress, self.drafting, self.seen = events.progress, events.drafting, None

    def num_tokens(self, id: RequestId) -> int:
        """Response tokens of an unfinished request, as last told, or that it came with."""
        return max(self.progress.get(id, 0), num_response_tokens(self.unfinished[id]))

    # Its lifecycle

    def enter(self) -> None:
        """Begin to wake or to take weights; again, when it woke without."""
        self._become({_SERVING: _ENTERING, _ENTERING: _ENTERING})

    def serve(self) -> None:
        """Begin to work, with its GPUs and the weights of its stage."""
        self._become({_ENTERING: _SERVING})
        self.rest()

    def stand_by(self) -> None:
        """Leave the GPUs to another layout; what could be withdrawn was."""
        arrows = {_SERVING: _STANDBY, _ENTERING: _STANDBY, _DEAD: _DEAD_ON_STANDBY}
        self._become(arrows | {_GONE: _GONE})
        self.finishing = set(self.unfinished)
        self.rest()

    def leave_standby(self) -> None:
        """Come back to the GPUs with its layout, or after the trainer."""
        self._become({_STANDBY: _ENTERING, _DEAD_ON_STANDBY: _DEAD, _GONE: _GONE})

    def die(self) -> None:
        """Lose all that it had, and be restarted."""
        self._become({_SERVING: _DEAD, _ENTERING: _DEAD, _STANDBY: _DEAD_ON_STANDBY})
        self.version = None
        self.finishing.clear()
        self._drop_kv(self.unfinished.values())
        self.begin(Activity.RESTART)

    def revive(self) -> None:
        """Be there again, empty."""
        self._become({_DEAD: _SERVING, _DEAD_ON_STANDBY: _STANDBY})
        self.rest()

    def lose(self) -> None:
        """Come back no more. Its requests stay until they are others'."""
        self._become({_DEAD: _GONE, _DEAD_ON_STANDBY: _GONE})
        self._end_span()

    def _become(self, arrows: Mapping[Lifecycle, Lifecycle]) -> None:
        assert self.lifecycle in arrows, f"engine {self.index} is {self.lifecycle.value}"
        self.lifecycle = arrows[self.lifecycle]

    def shares_memory_with(self, other: "TrackedEngine") -> bool:
        """Whether both are on one node."""
        return self.engine.node_id is not None and self.engine.node_id == other.engine.node_id

    def view(self) -> EngineView:
        if self.seen is None:
            progress = {id: self.num_tokens(id) for id in self.unfinished}
            drafting = {id: self.drafting[id] for id in self.unfinished if id in self.drafting}
            engine = self.engine
            self.seen = EngineView(self.index, progress, drafting, engine.tp_degree, engine.node_id)
        return self.seen

    def _drop_kv(self, requests: Iterable[RolloutRequest]) -> None:
        """Forget saved keys and values of some of its unfinished requests, for whoever has them
        after this one."""
        self.expect([replace(request, kv=None) for request in requests if request.kv])

    # What it does when

    def begin(self, activity: Activity, label: str = "") -> None:
        """Note that it does this from now on."""
        open_span = self.spans[-1] if self.spans and self.spans[-1].end_s == inf else None
        if open_span and (open_span.activity, open_span.label) == (activity, label):
            return
        self._end_span()
        self.spans.append(Span(self.index, activity, label, now_s()))

    def rest(self) -> None:
        """Note that it has nothing to do from now on; on standby, it has no GPUs either."""
        if self.standby:
            self.begin(Activity.PARKED)
        else:
            self._end_span()

    def _end_span(self) -> None:
        if not self.spans or self.spans[-1].end_s < inf:
            return
        span = self.spans[-1]
        span.end_s = now_s()
        if span.activity is Activity.ROLLOUT:
            self.tally.busy_s += span.end_s - span.start_s

    # What it asks of its engine

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Some of its unfinished requests."""
        if not requests:
            return
        assert self.takes_requests
        assert self.stage is not None
        self.begin(Activity.ROLLOUT, self.label)
        with suppress(EngineDied):
            await self.engine.submit(requests)
        self._drop_kv(requests)

    async def submit_all(self) -> None:
        """Submit what has waited for it to wake, or for weights."""
        waiting = [r for id, r in self.unfinished.items() if id not in self.finishing]
        await self.submit(waiting)

    async def give(self, requests: Sequence[RolloutRequest]) -> None:
        """Add to what it does in its present stage."""
        self.expect(requests)
        if self.takes_requests:
            await self.submit(requests)

    async def take(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        """Requests away from it; those that have finished meanwhile are left out and stay."""
        taken = await self._fetch(ids, partial(self.engine.withdraw, keep_kv=keep_kv), keep_kv)
        for request in taken:
            self.forget(request.id)
        return taken

    async def copy(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        """Requests, which go on here, without those that have finished meanwhile."""
        return await self._fetch(ids, partial(self.engine.copy, keep_kv=keep_kv), keep_kv)

    async def redraft(self, settings: Mapping[RequestId, DraftSetting]) -> None:
        """Draft so for these unfinished requests from now on."""
        self.expect(replace(self.unfinished[id], drafting=s) for id, s in settings.items())
        if self.takes_requests:
            with suppress(EngineDied):
                await self.engine.redraft(settings)

    async def count(self) -> float:
        """Add what it did since the last call to what is known of the stage; the seconds in which
        it saved keys and values."""
        assert self.stage is not None
        kv = KVCounts()
        with suppress(EngineDied):
            self.tally.drafting += await self.engine.take_drafting_counts()
            if self.mates:
                kv = await self.engine.take_kv_counts()
        if kv.load_s:
            self.stage.link_bytes_per_s.append(kv.num_bytes_loaded / kv.load_s)
        return kv.export_s

    async def _fetch(
        self, ids: Sequence[RequestId], call: Fetch, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        """Unfinished requests with what was generated."""
        if not self.takes_requests:
            return [replace(self.unfinished[id], kv=None) for id in ids]
        try:
            fetched = await call(ids)
        except EngineDied:
            return []
        return [
            replace(self.unfinished[r.id], generated=r.generated, kv=r.kv if keep_kv else None)
            for r in fetched
        ]


def num_response_tokens(request: RolloutRequest) -> int:
    """Response tokens that a request has."""
    return len(request.generated.token_ids) if request.generated else 0


def now_s() -> float:
    """Seconds of the event loop's clock, which a simulation may have made its own."""
    return asyncio.get_running_loop().time()
