"""Runs a rollout phase over several engines.

    submit ─► every engine ─► a pump per engine ─► inbox ─► observe ─► decide (policies) ─► move
                                                     │
                                                     └─ a death: requests go to living engines,
                                                        the engine is restarted meanwhile

The coordinator waits for the inbox alone; each pump's wait is bounded by its engine, so a phase
ends, or fails with the engine's name. A finished rollout is handed to `on_finished` before it
counts as finished.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field

from engines.rollout.interface import Engine, EngineDied, EngineEvents
from engines.rollout.moves import EngineView, Migrate, Policy, RolloutView
from schemas.rollout import DraftingCounts, RequestId, Rollout, RolloutRequest
from schemas.step import EngineShare
from schemas.weights import PolicyWeights

OnFinished = Callable[[Sequence[Rollout]], Awaitable[None]]
OnProgress = Callable[[RolloutView], None]


@dataclass(slots=True)
class _Lane:
    """One engine in a phase."""

    engine: Engine
    alive: bool = True
    unfinished: dict[RequestId, RolloutRequest] = field(default_factory=dict)
    progress: Mapping[RequestId, int] = field(default_factory=dict)
    num_rollouts: int = 0
    num_tokens: int = 0
    last_finish_s: float = 0.0
    num_restarts: int = 0
    seen: EngineView | None = None
    """The last view of it; None once something has changed, so that one event among hundreds of
    engines costs one new view."""

    def view(self) -> EngineView:
        if self.seen is None:
            progress = {id: self.progress.get(id, 0) for id in self.unfinished}
            self.seen = EngineView(self.engine.index, progress)
        return self.seen


class Coordinator:
    """Owns the engines of a run: starts them, keeps their weights current, rolls out."""

    def __init__(
        self, engines: Sequence[Engine], policies: Sequence[Policy] = (), max_restarts: int = 3
    ) -> None:
        assert engines
        self._lanes = {engine.index: _Lane(engine) for engine in engines}
        self._policies = tuple(policies)
        self._max_restarts = max_restarts
        self._num_restarts = dict.fromkeys(self._lanes, 0)
        self._weights: PolicyWeights | None = None
        self._inbox: asyncio.Queue[tuple[int, EngineEvents | BaseException]] = asyncio.Queue()
        self._pumps: dict[int, asyncio.Task] = {}
        self._restarts: dict[int, asyncio.Task] = {}

    async def start(self) -> None:
        await _all(lane.engine.start() for lane in self._lanes.values())

    async def shutdown(self) -> None:
        await _all(lane.engine.shutdown() for lane in self._lanes.values())

    @property
    def policy_version(self) -> int | None:
        """Of every engine; None before the first sync."""
        return self._weights.policy_version if self._weights else None

    async def load_weights(self, weights: PolicyWeights) -> float:
        """Bring every engine to this policy version; an engine that dies of it is restarted.

        Returns the largest canary error. Raises `WeightSyncError` from any engine.
        """
        self._weights = weights
        errors = await _all(self._sync(lane) for lane in self._lanes.values())
        return max(errors)

    async def roll_out(
        self,
        assignments: Sequence[tuple[int, RolloutRequest]],
        on_finished: OnFinished,
        on_progress: OnProgress | None = None,
    ) -> list[EngineShare]:
        """Generate every request, starting on the engine it is assigned to.

        Raises `EngineDied` when an engine dies more often than `max_restarts` in a run.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        num_rollouts, num_finished = len(assignments), 0
        async with self._phase():
            await self._submit(assignments)
            while num_finished < num_rollouts:
                index, event = await self._inbox.get()
                if isinstance(event, BaseException):
                    await self._on_death(index, event)
                    continue
                finished = self._observe(index, event, loop.time() - started_s)
                if finished:
                    await on_finished(finished)
                    num_finished += len(finished)
                if on_progress or self._policies:
                    view = self._view(loop.time() - started_s, num_finished, num_rollouts)
                    if on_progress:
                        on_progress(view)
                    await self._decide(view)
        return await _all(self._share(lane) for lane in self._lanes.values())

    @asynccontextmanager
    async def _phase(self) -> AsyncGenerator[None]:
        for index, lane in self._lanes.items():
            self._lanes[index] = _Lane(lane.engine)
            self._pumps[index] = asyncio.create_task(self._pump(lane.engine))
        try:
            yield
            # The next phase wants every engine; a restart that fails must fail this one.
            await _all(self._restarts.values())
        finally:
            tasks = [*self._pumps.values(), *self._restarts.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._pumps.clear()
            self._restarts.clear()
            self._inbox = asyncio.Queue()

    async def _pump(self, engine: Engine) -> None:
        try:
            while True:
                await self._inbox.put((engine.index, await engine.next_events()))
        except Exception as error:
            # The coordinator decides whether this is a death or a failure of the phase.
            await self._inbox.put((engine.index, error))

    async def _submit(self, assignments: Iterable[tuple[int, RolloutRequest]]) -> None:
        by_engine: dict[int, list[RolloutRequest]] = {}
        for index, request in assignments:
            by_engine.setdefault(index, []).append(request)
        for index, requests in by_engine.items():
            lane = self._lanes[index]
            lane.unfinished.update((request.id, request) for request in requests)
            lane.seen = None
        await _all(
            self._submit_to(self._lanes[index], requests) for index, requests in by_engine.items()
        )

    async def _submit_to(self, lane: _Lane, requests: list[RolloutRequest]) -> None:
        try:
            await lane.engine.submit(requests)
        except EngineDied:
            if not lane.alive:
                raise
            # Its pump reports the same death, and `_on_death` resubmits.

    def _observe(self, index: int, events: EngineEvents, elapsed_s: float) -> list[Rollout]:
        lane = self._lanes[index]
        finished = [r for r in events.finished if lane.unfinished.pop(r.request.id, None)]
        lane.progress = events.progress
        lane.seen = None
        if finished:
            lane.num_rollouts += len(finished)
            lane.num_tokens += sum(len(r.generated.token_ids) for r in finished)
            lane.last_finish_s = elapsed_s
        return finished

    def _view(self, elapsed_s: float, num_finished: int, num_rollouts: int) -> RolloutView:
        engines = tuple(lane.view() for lane in self._lanes.values() if lane.alive)
        return RolloutView(elapsed_s, engines, num_finished, num_rollouts)

    async def _decide(self, view: RolloutView) -> None:
        for policy in self._policies:
            for move in policy.decide(view):
                await self._migrate(move)

    async def _migrate(self, move: Migrate) -> None:
        origin = next(lane for lane in self._lanes.values() if move.id in lane.unfinished)
        target = self._lanes[move.to_engine]
        if origin is target or not target.alive:
            return
        try:
            continued = await origin.engine.withdraw([move.id])
        except EngineDied:
            return  # Its pump reports the death, and the request starts afresh elsewhere.
        if continued:
            del origin.unfinished[move.id]
            origin.seen = None
            await self._submit([(target.engine.index, request) for request in continued])

    async def _on_death(self, index: int, error: BaseException) -> None:
        if not isinstance(error, EngineDied):
            raise error
        self._count_restart(error)
        lane = self._lanes[index]
        lane.alive = False
        lane.num_restarts += 1
        orphans, lane.unfinished, lane.seen = list(lane.unfinished.values()), {}, None
        self._restarts[index] = asyncio.create_task(self._restart(lane))
        living = [i for i, other in self._lanes.items() if other.alive]
        if not living:
            await self._restarts[index]
            living = [index]
        await self._submit((living[i % len(living)], request) for i, request in enumerate(orphans))

    async def _restart(self, lane: _Lane) -> None:
        await lane.engine.start()
        assert self._weights is not None
        await lane.engine.load_weights(self._weights)
        lane.alive = True
        self._pumps[lane.engine.index] = asyncio.create_task(self._pump(lane.engine))

    async def _sync(self, lane: _Lane) -> float:
        assert self._weights is not None
        while True:
            try:
                return await lane.engine.load_weights(self._weights)
            except EngineDied as error:
                self._count_restart(error)
                await lane.engine.start()

    def _count_restart(self, death: EngineDied) -> None:
        """Raises the death when this engine has been restarted often enough in the run."""
        self._num_restarts[death.engine] += 1
        if self._num_restarts[death.engine] > self._max_restarts:
            raise death

    @staticmethod
    async def _share(lane: _Lane) -> EngineShare:
        try:
            drafting = await lane.engine.take_drafting_counts()
        except EngineDied:
            # All its rollouts are there; the next weight sync meets the death and mends it.
            drafting = DraftingCounts()
        return EngineShare(
            engine=lane.engine.index,
            num_rollouts=lane.num_rollouts,
            num_tokens=lane.num_tokens,
            busy_s=lane.last_finish_s,
            num_restarts=lane.num_restarts,
            **asdict(drafting),
        )


async def _all(awaitables: Iterable[Awaitable]) -> list:
    """Every result, or the first error once all the others have ended: nothing is left running."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
