"""The coordinator's record of one engine: its requests, its stage and its activities over time.

Methods here suppress `EngineDied`, because the engine's pump meets the same death and reports it.
Until then the requests stay in `unfinished`. `reassign.py` takes them from there.

The coordinator's copy of a request is authoritative. An engine adds only the generated tokens and
the place of saved keys and values. So a request keeps its drafting setting on every engine. Saved
keys and values go to the next engine only.

While the trainer has the GPUs, all engines are on standby.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from refrain.engines.rollout.interface import Engine, EngineDied, EngineEvents
from refrain.engines.rollout.lifecycle import Lifecycle
from refrain.engines.rollout.moves import EngineView
from refrain.engines.rollout.stage import GenerationStage, Tally
from refrain.schemas.counts import KVCounts
from refrain.schemas.rollout import DraftProgress, DraftSetting, RequestId, RolloutRequest
from refrain.schemas.timeline import Activity, Span

Fetch = Callable[[Sequence[RequestId]], Awaitable[list[RolloutRequest]]]


_SERVING, _ENTERING, _STANDBY, _DEAD, _DEAD_ON_STANDBY, _GONE = Lifecycle


@dataclass(slots=True, eq=False)
class TrackedEngine:
    """An engine with its queue of sub-batches (RhymeRL, section 4.2).

    An engine works on one stage at a time. It begins the next when it is empty, or earlier if that
    stage is `in_flight`. All requests on it run under one policy version.
    """

    engine: Engine
    lifecycle: Lifecycle = Lifecycle.SERVING
    holds_gpus: bool = False
    """Whether the engine occupies GPU memory, even if its GPUs belong to another layout now."""
    version: int | None = None
    """Policy version of its weights. None: no weights."""
    stage: GenerationStage | None = None
    """Current or last stage."""
    waiting: deque[GenerationStage] = field(default_factory=deque)
    """Queue of later stages."""
    gpu_sharers: "Sequence[TrackedEngine]" = ()
    """Engines on the same GPUs in other layouts."""
    unfinished: dict[RequestId, RolloutRequest] = field(default_factory=dict)
    """Requests of its stage, and of earlier ones, that are not known to be finished."""
    earlier: dict[RequestId, GenerationStage] = field(default_factory=dict)
    """Stage of each unfinished request that is not of `stage`."""
    finishing: set[RequestId] = field(default_factory=set)
    """Unfinished requests that could not be withdrawn when the engine went on standby, or to its
    next stage. Either the engine had finished them and their event is still to come, or the engine
    is dead."""
    progress: Mapping[RequestId, int] = field(default_factory=dict)
    drafting: Mapping[RequestId, DraftProgress] = field(default_factory=dict)
    arriving: dict[RequestId, asyncio.Task] = field(default_factory=dict)
    """Order that submits each of the unfinished requests that are on their way to the engine."""
    num_promised: int = 0
    """Requests that other engines prepare to give to this one."""
    spans: list[Span] = field(default_factory=list)
    """Spans of its activities, on the event loop's clock."""
    woken_s: float = -inf
    """Time of the last wake, on the event loop's clock."""
    seen: EngineView | None = None
    """Cached view; None after a change. With hundreds of engines, one event then rebuilds one
    view only."""

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
        """Whether another layout or the trainer has its GPUs. If requests are still unfinished,
        the engine had finished them before it left, and their event is still to come."""
        return self.lifecycle in (Lifecycle.STANDBY, Lifecycle.DEAD_ON_STANDBY)

    @property
    def entering(self) -> bool:
        return self.lifecycle is Lifecycle.ENTERING

    @property
    def free(self) -> bool:
        """Whether the engine can begin the next stage."""
        return self.takes_requests and (self.has_finished_part or self._goes_on_in_flight)

    @property
    def _goes_on_in_flight(self) -> bool:
        stage = self.stage
        started = stage and stage.in_flight and not (stage.waiting or self.waits_for_sharers)
        return bool(started and self.waiting and self.waiting[0].in_flight)

    @property
    def has_finished_part(self) -> bool:
        """Whether the engine has none of its stage's requests, and none of them waits or is on its
        way."""
        waits = self.stage is not None and self.stage.waiting
        return not (self.unfinished or waits or self.waits_for_sharers or self.num_promised)

    @property
    def waits_for_sharers(self) -> bool:
        """Whether a parked engine on the same GPUs still has to report finished requests."""
        return any(sharer.standby and sharer.unfinished for sharer in self.gpu_sharers)

    @property
    def takes_requests(self) -> bool:
        """Whether a submitted request would start at once."""
        return self.lifecycle is Lifecycle.SERVING

    @property
    def pending(self) -> list[RolloutRequest]:
        """Unfinished requests without those in `finishing`: the engine has yet to generate them."""
        return [r for id, r in self.unfinished.items() if id not in self.finishing]

    @property
    def label(self) -> str:
        return self.stage.label if self.stage else ""

    def is_at(self, stage: GenerationStage) -> bool:
        """Whether the engine works on the stage, or has finished its part and begun no other."""
        # Every view asks every engine, so this calls no other property.
        return self.stage is stage and self.lifecycle in (_SERVING, _ENTERING)

    def may_serve(self, stage: GenerationStage) -> bool:
        """Whether the engine works on the stage now or will later."""
        ahead = self.stage is not None and self.stage.follows_in_flight(stage)
        here = (self.stage is stage or ahead) and not self.standby
        return not self.gone and (here or self.index in stage.queues)

    def stage_of(self, id: RequestId) -> GenerationStage | None:
        """Return the stage of an unfinished request."""
        return self.earlier.get(id, self.stage)

    def expect(
        self, requests: Iterable[RolloutRequest], earlier: GenerationStage | None = None
    ) -> None:
        """Add requests. `earlier`: their stage, if it is not the engine's."""
        for request in requests:
            self.unfinished[request.id] = request
            if earlier is not None:
                self.earlier[request.id] = earlier
        self.seen = None

    def forget(self, id: RequestId) -> RolloutRequest | None:
        """Remove a request and return it. Return None if the engine has no such request."""
        self.seen = None
        self.finishing.discard(id)
        self.earlier.pop(id, None)
        found = self.unfinished.pop(id, None)
        if not self.unfinished and self.takes_requests:
            self.rest()
        return found

    def leave_unfinished(self) -> list[tuple[RolloutRequest, GenerationStage]]:
        """Remove all requests and return them with their stages, for other engines."""
        assert self.stage is not None
        left = [(r, self.earlier.pop(id, self.stage)) for id, r in self.unfinished.items()]
        self.unfinished, self.seen = {}, None
        return left

    async def begin_stage(self, stage: GenerationStage) -> None:
        """Go on to this stage. Withdraw the requests that are unfinished: they go on with it."""
        ids = [id for id in self.unfinished if id not in self.finishing]
        await self._wait_for(ids)
        if before := self.stage:
            self.earlier = dict.fromkeys(self.unfinished, before) | self.earlier
        if ids:
            fetched = await self._fetch(ids, self.engine.withdraw)
            self.expect(fetched)
            self.finishing |= set(ids) - {request.id for request in fetched}
        self.rest()
        self.stage, self.seen = stage, None

    def update_progress(self, events: EngineEvents) -> None:
        """Store the engine's progress report. `view` ignores reports about requests that this
        engine does not hold."""
        self.progress, self.drafting, self.seen = events.progress, events.drafting, None

    def num_tokens(self, id: RequestId) -> int:
        """Return the response tokens of an unfinished request: the last reported count, or the
        number it arrived with. The count falls when a conversation begins anew."""
        reported = self.progress.get(id)
        return num_response_tokens(self.unfinished[id]) if reported is None else reported

    # Lifecycle

    def enter(self) -> None:
        """Begin to wake or to load weights. An engine that left standby is entering already."""
        self._become({_SERVING: _ENTERING, _ENTERING: _ENTERING})

    def serve(self) -> None:
        """Begin to work: the engine has its GPUs and the weights of its stage."""
        self._become({_ENTERING: _SERVING})
        self.rest()

    def stand_by(self) -> None:
        """Leave the GPUs to another layout. Withdraw requests before this call."""
        arrows = {_SERVING: _STANDBY, _ENTERING: _STANDBY, _DEAD: _DEAD_ON_STANDBY}
        self._become(arrows | {_GONE: _GONE})
        self.finishing = set(self.unfinished)
        self.rest()

    def leave_standby(self) -> None:
        """Come back to the GPUs, from another layout or from the trainer."""
        self._become({_STANDBY: _ENTERING, _DEAD_ON_STANDBY: _DEAD, _GONE: _GONE})

    def die(self) -> None:
        """Note the engine's death: weights and saved keys and values are lost."""
        self._become({_SERVING: _DEAD, _ENTERING: _DEAD, _STANDBY: _DEAD_ON_STANDBY})
        self.version = None
        self.finishing.clear()
        self._drop_kv(self.unfinished.values())
        self.begin(Activity.RESTART)

    def revive(self) -> None:
        """Note that the engine has restarted, without weights or requests."""
        self._become({_DEAD: _SERVING, _DEAD_ON_STANDBY: _STANDBY})
        self.rest()

    def lose(self) -> None:
        """Note that the engine will not come back. Its requests stay until others take them."""
        self._become({_DEAD: _GONE, _DEAD_ON_STANDBY: _GONE})
        self._end_span()

    def _become(self, arrows: Mapping[Lifecycle, Lifecycle]) -> None:
        assert self.lifecycle in arrows, f"engine {self.index} is {self.lifecycle.value}"
        self.lifecycle = arrows[self.lifecycle]

    def shares_memory_with(self, other: "TrackedEngine") -> bool:
        """Whether both engines are known to be on one node."""
        return self.engine.node_id is not None and self.engine.node_id == other.engine.node_id

    def view(self) -> EngineView:
        if self.seen is None:
            own = [id for id in self.unfinished if id not in self.earlier]
            self.seen = EngineView(
                self.index,
                {id: self.num_tokens(id) for id in own},
                {id: self.drafting[id] for id in own if id in self.drafting},
                self.engine.tp_degree,
                self.engine.node_id,
                {id: self.num_tokens(id) for id in self.earlier if id in self.unfinished},
            )
        return self.seen

    def _drop_kv(self, requests: Iterable[RolloutRequest]) -> None:
        """Forget saved keys and values of these requests, if they are still unfinished: the next
        engine must not use them."""
        there = [self.unfinished[r.id] for r in requests if r.kv and r.id in self.unfinished]
        self.expect([replace(request, kv=None) for request in there])

    # Activities

    def begin(self, activity: Activity, label: str = "") -> None:
        """Begin a span of this activity and end the current one."""
        open_span = self.spans[-1] if self.spans and self.spans[-1].end_s == inf else None
        if open_span and (open_span.activity, open_span.label) == (activity, label):
            return
        self._end_span()
        self.spans.append(Span(self.index, activity, label, now_s()))

    def rest(self) -> None:
        """End the current span. On standby, begin a span of `PARKED`."""
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

    # Calls to the engine

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Submit some of the unfinished requests to the engine."""
        if not requests:
            return
        assert self.takes_requests
        assert self.stage is not None
        self.begin(Activity.ROLLOUT, self.label)
        with suppress(EngineDied):
            await self.engine.submit(requests)
        self._drop_kv(requests)

    async def add(
        self, requests: Sequence[RolloutRequest], earlier: GenerationStage | None = None
    ) -> None:
        """Add requests, as `expect` does. Submit them now if the engine is serving."""
        self.expect(requests, earlier)
        if self.takes_requests:
            await self.submit(requests)

    async def take(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        """Withdraw requests from the engine and return them. Requests that have finished meanwhile
        stay and are not returned."""
        await self._wait_for(ids)
        taken = await self._fetch(ids, partial(self.engine.withdraw, keep_kv=keep_kv), keep_kv)
        for request in taken:
            self.forget(request.id)
        return taken

    async def copy(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        """Return copies of requests, which go on here. Leave out those that have finished."""
        return await self._fetch(ids, partial(self.engine.copy, keep_kv=keep_kv), keep_kv)

    async def redraft(self, settings: Mapping[RequestId, DraftSetting]) -> None:
        """Change the drafting settings of these unfinished requests."""
        await self._wait_for(settings)
        self.expect(replace(self.unfinished[id], drafting=s) for id, s in settings.items())
        if self.takes_requests:
            with suppress(EngineDied):
                await self.engine.redraft(settings)

    async def _wait_for(self, ids: Iterable[RequestId]) -> None:
        """Wait until the engine has those of these requests that are on their way to it."""
        if orders := {self.arriving[id] for id in ids if id in self.arriving}:
            await asyncio.wait(orders)

    async def count(self) -> float:
        """Add the engine's counts since the last call to the stage. Return the seconds it spent on
        saving keys and values."""
        assert self.stage is not None
        kv = KVCounts()
        with suppress(EngineDied):
            self.tally.drafting += await self.engine.take_drafting_counts()
            if self.gpu_sharers or self.stage.moved_kv:
                kv = await self.engine.take_kv_counts()
        if kv.load_s:
            self.stage.link_bytes_per_s.append(kv.num_bytes_loaded / kv.load_s)
        return kv.export_s

    async def _fetch(
        self, ids: Sequence[RequestId], call: Fetch, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        """Return unfinished requests with their generated tokens."""
        if not self.takes_requests:
            return [replace(self.unfinished[id], kv=None) for id in ids]
        try:
            fetched = await call(ids)
        except EngineDied:
            return []
        return [
            replace(self.unfinished[r.id], generated=r.generated, kv=r.kv if keep_kv else None)
            for r in fetched
            if r.id in self.unfinished  # Its finish may have been reported meanwhile.
        ]


def num_response_tokens(request: RolloutRequest) -> int:
    """Return the number of response tokens sampled so far."""
    return request.generated.num_sampled if request.generated else 0


def now_s() -> float:
    """Return the event loop's time in seconds. In simulations this is virtual time."""
    return asyncio.get_running_loop().time()
