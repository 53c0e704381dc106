"""The fleet owns the engines of a run and the tasks that wait for them.

Each task puts one report into the inbox:

    pump        events of an engine: finished requests and progress
    wake        an engine has its GPUs, after engines of other layouts have released them
    sync        an engine has the weights of its stage
    refresh     a parked engine has the weights of its pool's stage
    park        an engine has released its GPUs
    restart     a dead engine has restarted, after other layouts have released its GPUs
    precopy     an engine has saved keys and values of requests that continue on it
    expect_kv   an engine is ready to load keys and values that others saved
    copy        an engine has copied requests that other engines will race
    submit      an engine has the copies that it races

All but pumps and restarts are orders (`orders.py`): each engine carries out its orders one by one.
The fleet decides nothing. The coordinator reads the inbox and decides.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from itertools import chain
from typing import Concatenate, ParamSpec

from refrain.engines.bounded import cancel, gather_all
from refrain.engines.rollout import orders
from refrain.engines.rollout.deaths import Deaths
from refrain.engines.rollout.engine_reports import EngineReport, Fatal, Inbox, Signal
from refrain.engines.rollout.interface import Engine, EngineDied, EngineGone
from refrain.engines.rollout.lifecycle import Lifecycle
from refrain.engines.rollout.preparations import Preparations
from refrain.engines.rollout.stage import GenerationStage, Tally
from refrain.engines.rollout.timeline_log import TimelineLog
from refrain.engines.rollout.tracked_engine import TrackedEngine
from refrain.schemas.layout import Pool
from refrain.schemas.rollout import RequestId, RolloutRequest
from refrain.schemas.timeline import Activity
from refrain.schemas.weights import PolicyWeights

P = ParamSpec("P")


class Fleet:
    """Engines of a run: starts them, collects their events, restarts them after a death."""

    def __init__(
        self,
        engines: Sequence[Engine],
        max_restarts: int,
        pools: Sequence[Pool] = (),
        keep_parked_current: bool = True,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Begin with each pool in its base layout. `keep_parked_current`: parked engines load
        weights too. `log` receives a message for each restart and each lost engine."""
        assert engines
        off = {i for pool in pools for i in pool.standby}
        self.engines = {
            e.index: TrackedEngine(e, Lifecycle.STANDBY if e.index in off else Lifecycle.SERVING)
            for e in engines
        }
        self.inbox = Inbox()
        self.changed: set[int] = set()
        """Indexes of engines whose state changed: one of them may be able to begin a stage."""
        self._pools = tuple(pools)
        for pool in pools:
            self._share_gpus(pool)
        self.base = [tracked for tracked in self.engines.values() if not tracked.standby]
        """Engines on which stages begin: those of each pool's base layout. Some may be gone."""
        self.preparations = Preparations()
        self._last_gone: EngineGone | None = None
        self._unreported: set[int] = set()
        """Lost engines that no stage's outcome reports yet."""
        self._log = log
        self._keep_parked_current = keep_parked_current
        self.deaths = Deaths(max_restarts)
        self._pumps: dict[int, asyncio.Task] = {}
        self._orders: dict[int, list[asyncio.Task]] = {index: [] for index in self.engines}
        """Pending orders of each engine."""
        self._parks: dict[int, asyncio.Task] = {}
        """Last order to park of each engine."""
        self._waiting: dict[int, EngineDied] = {}
        """Deaths of engines whose restart has not begun, by engine."""
        self._ends: dict[int, asyncio.Task] = {}
        """Task that kills the processes of a dead engine, by engine."""
        self._restarts: dict[int, asyncio.Task] = {}
        self.timeline_log = TimelineLog(self.engines.values())

    def _share_gpus(self, pool: Pool) -> None:
        layouts = {tp: [self.engines[i] for i in own] for tp, own in pool.engines.items()}
        for tp_degree, own in layouts.items():
            for tracked in own:
                assert not tracked.gpu_sharers, f"engine {tracked.index} is in two pools"
                tracked.gpu_sharers = [
                    m for tp, others in layouts.items() if tp != tp_degree for m in others
                ]

    async def start(self) -> None:
        pooled = {i for pool in self._pools for own in pool.engines.values() for i in own}
        alone = [tracked for index, tracked in self.engines.items() if index not in pooled]
        await gather_all([*map(self._start, alone), *map(self._start_pool, self._pools)])

    async def shutdown(self) -> None:
        orders = [order for own in self._orders.values() for order in own]
        under_way = [*self._ends.values(), *self._restarts.values()]
        await cancel([*self._pumps.values(), *orders, *under_way])
        await gather_all(tracked.engine.shutdown() for tracked in self.engines.values())

    def remaining(self) -> list[TrackedEngine]:
        """Return the engines that a stage can begin on. Raise the last `EngineGone` if none is
        left."""
        remaining = [tracked for tracked in self.base if not tracked.gone]
        if not remaining:
            assert self._last_gone
            raise self._last_gone
        return remaining

    @property
    def settled(self) -> bool:
        """Whether the inbox is empty and no order or restart is under way."""
        orders = (order for own in self._orders.values() for order in own)
        under_way = chain(orders, self._restarts.values())
        return self.inbox.empty() and all(task.done() for task in under_way)

    def take_changed(self) -> list[TrackedEngine]:
        """Return the changed engines, with those on the same GPUs, and clear the record."""
        changed = [self.engines[index] for index in self.changed if index in self.engines]
        self.changed.clear()
        return list(
            dict.fromkeys(m for tracked in changed for m in (tracked, *tracked.gpu_sharers))
        )

    def at(self, stage: GenerationStage) -> list[TrackedEngine]:
        """Return the engines that work on the stage, or have finished it and begun no other."""
        return [tracked for tracked in self.engines.values() if tracked.is_at(stage)]

    def holders(self, stage: GenerationStage, id: RequestId) -> list[TrackedEngine]:
        """Return the engines that have this request unfinished: several in a race. The list may
        include dead engines, and engines on standby that have yet to report it as finished."""
        engines = self.engines.values()
        return [m for m in engines if id in m.unfinished and m.stage_of(id) is stage]

    def listen(self) -> None:
        """Start a pump for every live engine. `stop_listening` ends the pumps."""
        for tracked in self.engines.values():
            self.listen_to(tracked)

    async def stop_listening(self) -> None:
        await cancel(self._pumps.values())
        self._pumps.clear()

    # Orders

    def order(
        self,
        work: Callable[Concatenate[TrackedEngine, P], Awaitable[EngineReport]],
        tracked: TrackedEngine,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> asyncio.Task:
        """Begin `work(tracked, ...)` after the engine's earlier orders. Its report, or the error
        that it raises, goes to the inbox."""
        earlier = [order for order in self._orders[tracked.index] if not order.done()]
        order = asyncio.create_task(self._carry_out(earlier, work, tracked, *args, **kwargs))
        self._orders[tracked.index] = [*earlier, order]
        return order

    async def _carry_out(
        self,
        earlier: Collection[asyncio.Task],
        work: Callable[Concatenate[TrackedEngine, P], Awaitable[EngineReport]],
        tracked: TrackedEngine,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        try:
            if earlier:
                await asyncio.wait(earlier)
            report = await work(tracked, *args, **kwargs)
        except Exception as failure:
            report = failure
        await self.inbox.put((tracked.index, report))

    def give(self, tracked: TrackedEngine, request: RolloutRequest) -> None:
        """Add a request of the engine's stage, and order the engine to take it if it is serving."""
        tracked.expect([request])
        if tracked.takes_requests:
            order = self.order(orders.submit, tracked, [request.id])
            tracked.arriving[request.id] = order
            order.add_done_callback(lambda _: tracked.arriving.pop(request.id, None))

    def refresh(self, tracked: TrackedEngine, stage: GenerationStage) -> None:
        """Order a parked engine to load the stage's weights, if `keep_parked_current`."""
        if self._keep_parked_current:
            self.order(orders.refresh, tracked, stage)

    def park(self, tracked: TrackedEngine) -> None:
        """Order the engine to release its GPUs."""
        self._parks[tracked.index] = self.order(orders.park, tracked)

    def wake(self, tracked: TrackedEngine) -> None:
        """Order the engine to take its GPUs once the other engines there have parked. Its state
        becomes `ENTERING`, until it has its GPUs and weights."""
        tracked.enter()
        tracked.begin(Activity.SWITCH, tracked.label)
        self.order(self._wake, tracked, self._leaving(tracked))

    async def _wake(self, tracked: TrackedEngine, leaving: Collection[asyncio.Task]) -> Signal:
        await self._wait_for_gpus(tracked, leaving)
        return await orders.wake(tracked)

    def _leaving(self, tracked: TrackedEngine) -> list[asyncio.Task]:
        """Return the tasks after which the GPUs are free."""
        tasks = (self._parks, self._restarts)
        return [
            of[sharer.index] for sharer in tracked.gpu_sharers for of in tasks if sharer.index in of
        ]

    async def _wait_for_gpus(
        self, tracked: TrackedEngine, leaving: Collection[asyncio.Task]
    ) -> None:
        """Wait for the orders in `leaving`, then until dead engines have left these GPUs."""
        if leaving:
            await asyncio.wait(leaving)
        sharing = [tracked.index, *(sharer.index for sharer in tracked.gpu_sharers)]
        while ends := [e for i in sharing if (e := self._ends.get(i)) and not e.done()]:
            await asyncio.wait(ends)

    async def sync_all(self, weights: PolicyWeights) -> float:
        """Load this policy version into every live engine. The next stage handles deaths.

        Returns the largest canary error. Raises `WeightSyncError` if any engine does.
        """
        orders = [order for own in self._orders.values() for order in own]
        await asyncio.gather(*self._restarts.values(), *orders)
        engines = [m for m in self.engines.values() if self._keep_parked_current or not m.standby]
        there = [tracked for tracked in engines if tracked.alive]
        return max(await gather_all(self._load(tracked, weights) for tracked in there), default=0.0)

    async def _load(self, tracked: TrackedEngine, weights: PolicyWeights) -> float:
        try:
            error = await tracked.engine.load_weights(weights)
        except EngineDied as death:
            await self.inbox.put((tracked.index, death))
            return 0.0
        tracked.version = weights.policy_version
        return error

    # Deaths

    async def on_death(self, tracked: TrackedEngine, death: EngineDied) -> None:
        """Note a death and start to kill the engine's processes. Raise as `Deaths.count` does, if
        the engine must not restart."""
        self.deaths.count(death)
        self._ends[tracked.index] = asyncio.create_task(self._end(tracked))
        pump = self._pumps.pop(tracked.index, None)
        await cancel([*([pump] if pump else []), *self._orders[tracked.index]])
        self._orders[tracked.index].clear()
        self.changed.update(target.index for target in self.preparations.drop(tracked))
        tracked.die()
        self._waiting[tracked.index] = death

    def needs_restart(self, tracked: TrackedEngine) -> bool:
        """Whether the engine is dead and its restart has not begun."""
        return tracked.index in self._waiting

    def restart(self, tracked: TrackedEngine) -> None:
        """Begin to restart a dead engine, unless its restart is under way."""
        if death := self._waiting.pop(tracked.index, None):
            restart = self._restart(tracked, death, self._leaving(tracked))
            self._restarts[tracked.index] = asyncio.create_task(restart)

    def remove(self, tracked: TrackedEngine, gone: EngineGone) -> None:
        """Continue without an engine. Raise its `EngineGone` if it was the last."""
        self._last_gone = gone
        self._unreported.add(tracked.index)
        tracked.lose()
        self._log(f"{gone}; going on with {len(self.remaining())} of {len(self.base)} engines")

    def take_lost(self) -> set[int]:
        """Return the engines that were lost since the last call."""
        lost, self._unreported = self._unreported, set()
        return lost

    def new_tallies(self) -> dict[int, Tally]:
        """Return a new stage's tallies, by engine, with those of engines lost before it."""
        lost = self.take_lost()
        there = [i for i, tracked in self.engines.items() if i in lost or not tracked.gone]
        return {i: Tally(gone=i in lost) for i in there}

    def revive(self, tracked: TrackedEngine) -> None:
        """Resume work with a restarted engine. Park or wake it if its pool switched layouts
        meanwhile."""
        tracked.revive()
        self.listen_to(tracked)
        if tracked.standby and tracked.holds_gpus:
            self.park(tracked)
        elif not (tracked.standby or tracked.holds_gpus):
            self.wake(tracked)

    def listen_to(self, tracked: TrackedEngine) -> None:
        """Start a pump that waits for the engine's next events, if the engine is alive. Call this
        again after you have handled the events: with many engines that takes time, and each report
        then covers more."""
        pump = self._pumps.get(tracked.index)
        if tracked.alive and (pump is None or pump.done()):
            self._pumps[tracked.index] = asyncio.create_task(self._pump(tracked.engine))

    async def _pump(self, engine: Engine) -> None:
        try:
            report: EngineReport = await engine.next_events()
        except Exception as error:
            # The coordinator decides whether this is a death or fails the stage.
            report = error
        await self.inbox.put((engine.index, report))

    async def _end(self, tracked: TrackedEngine) -> None:
        # If the processes cannot be killed, the restart reports it.
        with suppress(EngineDied):
            await tracked.engine.kill()
        tracked.holds_gpus = False

    async def _restart(
        self, tracked: TrackedEngine, death: EngineDied, leaving: Collection[asyncio.Task]
    ) -> None:
        await self._wait_for_gpus(tracked, leaving)
        if tracked.standby and any(sharer.holds_gpus for sharer in tracked.gpu_sharers):
            # Another layout has taken the GPUs back: restart when its pool can switch again.
            self._waiting[tracked.index] = death
            await self.inbox.put((tracked.index, Signal.PARKED))
            return
        try:
            await self._start_again(tracked, death)
            report: EngineReport = Signal.RESTARTED
        except EngineGone as gone:
            report = gone
        except Exception as error:
            report = Fatal(error)
        await self.inbox.put((tracked.index, report))

    async def _start_again(self, tracked: TrackedEngine, death: EngineDied) -> None:
        while True:
            try:
                await self._start(tracked)
            except EngineGone:
                raise
            except EngineDied as again:
                self.deaths.count(death := again)
            else:
                self._log(f"{death}; it was started again")
                return

    async def _start_pool(self, pool: Pool) -> None:
        """Start the layouts one by one, because they share GPUs: the base layout last, since it
        keeps them."""
        for _, own in sorted(pool.engines.items(), reverse=True):
            await gather_all(self._start(self.engines[index]) for index in own)

    async def _start(self, tracked: TrackedEngine) -> None:
        """Start an engine. Park it at once if it is on standby."""
        await tracked.engine.start()
        tracked.holds_gpus = True
        if tracked.standby:
            await tracked.engine.park()
            tracked.holds_gpus = False
            tracked.rest()
