"""The engines of a run and the tasks that wait for them, each of which reports to one inbox.

    pump        what happened on an engine
    wake        an engine has its GPUs, after the engines of other layouts have left them, dead or
                alive
    sync        an engine has the weights of its stage
    refresh     a parked engine has them
    park        an engine has left its GPUs
    restart     an engine is there again, after the same
    precopy     keys and values of requests that go on there are saved
    expect      such of others are made ready for an engine

All but the pump and restarts are orders: an engine carries out its own one after the other. Whoever
serves the inbox decides; here is nothing decided.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain

from engines.bounded import all_of, cancel
from engines.rollout.chronicle import Chronicle
from engines.rollout.deaths import Deaths
from engines.rollout.interface import Engine, EngineDied, EngineGone
from engines.rollout.news import Copied, Fatal, News, Refreshed, Signal, Synced
from engines.rollout.stage import GenerationStage
from engines.rollout.tracked_engine import Lifecycle, TrackedEngine, now_s
from schemas.layout import Pool
from schemas.rollout import RequestId, SavedKV
from schemas.timeline import Activity
from schemas.weights import PolicyWeights


class Fleet:
    """Starts engines, listens to them, and brings them up again when they die."""

    def __init__(
        self,
        engines: Sequence[Engine],
        max_restarts: int,
        pools: Sequence[Pool] = (),
        keep_parked_current: bool = True,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Engines in the base layouts of their pools. `keep_parked_current`: parked engines take
        weights too. `say` is told of engines that are gone."""
        assert engines
        off = {i for pool in pools for i in pool.standby}
        self.engines = {
            e.index: TrackedEngine(e, Lifecycle.STANDBY if e.index in off else Lifecycle.SERVING)
            for e in engines
        }
        self.inbox: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        self.changed: set[int] = set()
        """Engines that may have nothing left to do."""
        self._pools = tuple(pools)
        for pool in pools:
            self._share_gpus(pool)
        self.base = [tracked for tracked in self.engines.values() if not tracked.standby]
        """Engines that stages begin on, those of the layouts that pools are in then; some may be
        gone."""
        self._last_gone: EngineGone | None = None
        self._untold: set[int] = set()
        """Engines that were lost, and no stage's outcome says so yet."""
        self._say = say
        self._keep_parked_current = keep_parked_current
        self.deaths = Deaths(max_restarts)
        self._pumps: dict[int, asyncio.Task] = {}
        self._orders: dict[int, list[asyncio.Task]] = {index: [] for index in self.engines}
        """Orders of each engine that are not carried out yet."""
        self._parks: dict[int, asyncio.Task] = {}
        """Last order to park of each engine."""
        self._waiting: dict[int, EngineDied] = {}
        """Deaths of engines that are to be started again, and are not yet."""
        self._ends: dict[int, asyncio.Task] = {}
        """Last end of an engine that died: the processes that it left."""
        self._restarts: dict[int, asyncio.Task] = {}
        self.chronicle = Chronicle(self.engines.values())

    def _share_gpus(self, pool: Pool) -> None:
        layouts = {tp: [self.engines[i] for i in own] for tp, own in pool.engines.items()}
        for tp_degree, own in layouts.items():
            for tracked in own:
                assert not tracked.mates, f"engine {tracked.index} is in two pools"
                tracked.mates = [
                    m for tp, others in layouts.items() if tp != tp_degree for m in others
                ]

    async def start(self) -> None:
        pooled = {i for pool in self._pools for own in pool.engines.values() for i in own}
        alone = [tracked for index, tracked in self.engines.items() if index not in pooled]
        await all_of([*map(self._start, alone), *map(self._start_pool, self._pools)])

    async def shutdown(self) -> None:
        orders = [order for own in self._orders.values() for order in own]
        under_way = [*self._ends.values(), *self._restarts.values()]
        await cancel([*self._pumps.values(), *orders, *under_way])
        await all_of(tracked.engine.shutdown() for tracked in self.engines.values())

    def left(self) -> list[TrackedEngine]:
        """Engines that stages can begin on. Raises the last one's death when there is none."""
        left = [tracked for tracked in self.base if not tracked.gone]
        if not left:
            assert self._last_gone
            raise self._last_gone
        return left

    @property
    def settled(self) -> bool:
        """No report is to come but of requests, and none is unread."""
        orders = (order for own in self._orders.values() for order in own)
        under_way = chain(orders, self._restarts.values())
        return self.inbox.empty() and all(task.done() for task in under_way)

    def take_changed(self) -> list[TrackedEngine]:
        """Engines that may begin a stage now."""
        changed = [self.engines[index] for index in self.changed if index in self.engines]
        self.changed.clear()
        return list(dict.fromkeys(m for tracked in changed for m in (tracked, *tracked.mates)))

    def at(self, stage: GenerationStage) -> list[TrackedEngine]:
        """Engines at work on the stage, or waiting for another since they ended their part."""
        return [tracked for tracked in self.engines.values() if tracked.is_at(stage)]

    def holders(self, stage: GenerationStage, id: RequestId) -> list[TrackedEngine]:
        """Engines that have this request unfinished: several while it is raced. One on standby has
        it until it tells that it is finished; a dead one will begin with it."""
        engines = self.engines.values()
        return [m for m in engines if m.stage is stage and id in m.unfinished]

    def listen(self) -> None:
        """Listen to every engine that is alive, until `stop_listening`."""
        for tracked in self.engines.values():
            self.listen_to(tracked)

    async def stop_listening(self) -> None:
        await cancel(self._pumps.values())
        self._pumps.clear()

    # Orders

    def sync(self, tracked: TrackedEngine, stage: GenerationStage) -> None:
        """Have the engine take the stage's weights, if it has others. It is entering until then."""
        tracked.enter()
        self._order(tracked, partial(self._sync, tracked, stage, Synced))

    def refresh(self, tracked: TrackedEngine, stage: GenerationStage) -> None:
        """Have a parked engine take the stage's weights, if parked engines take any."""
        if self._keep_parked_current:
            self._order(tracked, partial(self._sync, tracked, stage, Refreshed))

    def park(self, tracked: TrackedEngine) -> None:
        """Have the engine leave its GPUs."""
        self._parks[tracked.index] = self._order(tracked, partial(self._park, tracked))

    def wake(self, tracked: TrackedEngine) -> None:
        """Have the engine take its GPUs once its mates are parked. It is entering until then, and
        longer when it needs weights."""
        tracked.enter()
        tracked.begin(Activity.SWITCH, tracked.label)
        self._order(tracked, partial(self._wake, tracked, self._leaving(tracked)))

    def precopy(self, tracked: TrackedEngine, ids: Sequence[RequestId], of: object) -> None:
        """Have the engine save what there is of these requests while they go on."""
        self._order(tracked, partial(self._precopy, tracked, ids, of))

    def expect_kv(self, tracked: TrackedEngine, saved: Sequence[SavedKV], of: object) -> None:
        """Have what was saved ahead made ready for a parked engine."""
        self._order(tracked, partial(self._expect_kv, tracked, saved, of))

    def _leaving(self, tracked: TrackedEngine) -> list[asyncio.Task]:
        """Work of its mates after which its GPUs are free."""
        tasks = (self._parks, self._restarts)
        return [of[mate.index] for mate in tracked.mates for of in tasks if mate.index in of]

    async def _wait_for_gpus(
        self, tracked: TrackedEngine, leaving: Collection[asyncio.Task]
    ) -> None:
        """Wait for what was ordered on its GPUs, and for the ends of those that die meanwhile."""
        if leaving:
            await asyncio.wait(leaving)
        sharing = [tracked.index, *(mate.index for mate in tracked.mates)]
        while ends := [e for i in sharing if (e := self._ends.get(i)) and not e.done()]:
            await asyncio.wait(ends)

    def _order(
        self,
        tracked: TrackedEngine,
        work: Callable[[], Awaitable[News]],
    ) -> asyncio.Task:
        """Order to an engine, carried out after its earlier ones."""
        own = [order for order in self._orders[tracked.index] if not order.done()]
        order = asyncio.create_task(self._carry_out(tracked, work, own))
        self._orders[tracked.index] = [*own, order]
        return order

    async def _carry_out(
        self,
        tracked: TrackedEngine,
        work: Callable[[], Awaitable[News]],
        earlier: Collection[asyncio.Task],
    ) -> None:
        try:
            if earlier:
                await asyncio.wait(earlier)
            news = await work()
        except Exception as failure:
            news = failure
        await self.inbox.put((tracked.index, news))

    async def _sync(
        self, tracked: TrackedEngine, stage: GenerationStage, report: type[Synced]
    ) -> Synced:
        started_s, error = now_s(), None
        if tracked.version != stage.weights.policy_version:
            tracked.begin(Activity.SYNC, stage.label)
            error = await tracked.engine.load_weights(stage.weights)
            tracked.version = stage.weights.policy_version
        if tracked.standby:
            tracked.rest()
        return report(error, now_s() - started_s)

    async def _precopy(
        self, tracked: TrackedEngine, ids: Sequence[RequestId], of: object
    ) -> Copied:
        there = tracked.takes_requests and ids
        return Copied(of, await tracked.engine.precopy(ids) if there else None)

    async def _expect_kv(
        self, tracked: TrackedEngine, saved: Sequence[SavedKV], of: object
    ) -> Copied:
        if tracked.standby:
            await tracked.engine.expect_kv(saved)
        return Copied(of)

    async def _park(self, tracked: TrackedEngine) -> Signal:
        if not tracked.holds_gpus:
            return Signal.PARKED
        try:
            await tracked.engine.park()
        except EngineDied:
            # Others come to its GPUs when this order is carried out.
            await tracked.engine.kill()
            raise
        finally:
            tracked.holds_gpus = False
        return Signal.PARKED

    async def _wake(self, tracked: TrackedEngine, leaving: Collection[asyncio.Task]) -> Signal:
        await self._wait_for_gpus(tracked, leaving)
        if tracked.standby:
            # Its GPUs are others' again, who do not wait for one that has yet to come to them.
            return Signal.PARKED
        tracked.begin(Activity.SWITCH, tracked.label)
        tracked.holds_gpus = True
        if not await tracked.engine.wake():
            tracked.version = None
        tracked.woken_s = now_s()
        return Signal.WOKEN

    async def sync_all(self, weights: PolicyWeights) -> float:
        """Bring every engine to this policy version. The death of one is dealt with when the next
        stage is served.

        Returns the largest canary error. Raises `WeightSyncError` from any engine.
        """
        orders = [order for own in self._orders.values() for order in own]
        await asyncio.gather(*self._restarts.values(), *orders)
        engines = [m for m in self.engines.values() if self._keep_parked_current or not m.standby]
        there = [tracked for tracked in engines if tracked.alive]
        return max(await all_of(self._load(tracked, weights) for tracked in there), default=0.0)

    async def _load(self, tracked: TrackedEngine, weights: PolicyWeights) -> float:
        try:
            error = await tracked.engine.load_weights(weights)
        except EngineDied as death:
            await self.inbox.put((tracked.index, death))
            return 0.0
        tracked.version = weights.policy_version
        return error

    # Deaths

    async def bury(self, tracked: TrackedEngine, death: EngineDied) -> None:
        """Note a death, and have its processes end. Raises the death when there were enough of this
        engine in the run, or this one will come again."""
        self.deaths.count(death)
        self._ends[tracked.index] = asyncio.create_task(self._end(tracked))
        pump = self._pumps.pop(tracked.index, None)
        await cancel([*([pump] if pump else []), *self._orders[tracked.index]])
        self._orders[tracked.index].clear()
        tracked.die()
        self._waiting[tracked.index] = death

    def waits(self, tracked: TrackedEngine) -> bool:
        """Whether it is dead and nobody has had it started again."""
        return tracked.index in self._waiting

    def restart(self, tracked: TrackedEngine) -> None:
        """Have a dead engine started again, unless it is being started."""
        if death := self._waiting.pop(tracked.index, None):
            restart = self._restart(tracked, death, self._leaving(tracked))
            self._restarts[tracked.index] = asyncio.create_task(restart)

    def lose(self, tracked: TrackedEngine, gone: EngineGone) -> None:
        """Go on without an engine. Raises its death when it was the last."""
        self._last_gone = gone
        self._untold.add(tracked.index)
        tracked.lose()
        self._say(f"{gone}; going on with {len(self.left())} of {len(self.base)} engines")

    def take_lost(self) -> set[int]:
        """Engines that were lost since the last call."""
        lost, self._untold = self._untold, set()
        return lost

    def revive(self, tracked: TrackedEngine) -> None:
        """Listen again to an engine that was restarted. Its GPUs may have changed hands
        meanwhile."""
        tracked.revive()
        self.listen_to(tracked)
        if tracked.standby and tracked.holds_gpus:
            self.park(tracked)
        elif not (tracked.standby or tracked.holds_gpus):
            self.wake(tracked)

    def listen_to(self, tracked: TrackedEngine) -> None:
        """Ask an engine that is alive what happens next. Again when the answer is dealt with: where
        that takes time, as it does with many engines, the next one tells of more."""
        pump = self._pumps.get(tracked.index)
        if tracked.alive and (pump is None or pump.done()):
            self._pumps[tracked.index] = asyncio.create_task(self._pump(tracked.engine))

    async def _pump(self, engine: Engine) -> None:
        try:
            news: News = await engine.next_events()
        except Exception as error:
            # Whether this is a death or a failure of the stage is decided where it is read.
            news = error
        await self.inbox.put((engine.index, news))

    async def _end(self, tracked: TrackedEngine) -> None:
        # What cannot be ended is told when it is to be started.
        with suppress(EngineDied):
            await tracked.engine.kill()
        tracked.holds_gpus = False

    async def _restart(
        self, tracked: TrackedEngine, death: EngineDied, leaving: Collection[asyncio.Task]
    ) -> None:
        await self._wait_for_gpus(tracked, leaving)
        if tracked.standby and any(mate.holds_gpus for mate in tracked.mates):
            # They came back to them meanwhile; it is started when they can leave.
            self._waiting[tracked.index] = death
            await self.inbox.put((tracked.index, Signal.PARKED))
            return
        try:
            await self._start_again(tracked, death)
            news: News = Signal.RESTARTED
        except EngineGone as gone:
            news = gone
        except Exception as error:
            news = Fatal(error)
        await self.inbox.put((tracked.index, news))

    async def _start_again(self, tracked: TrackedEngine, death: EngineDied) -> None:
        while True:
            try:
                await self._start(tracked)
            except EngineGone:
                raise
            except EngineDied as again:
                self.deaths.count(death := again)
            else:
                self._say(f"{death}; it was started again")
                return

    async def _start_pool(self, pool: Pool) -> None:
        """Start layout after layout, since they share GPUs; the base, which stays there, comes
        last."""
        for _, own in sorted(pool.engines.items(), reverse=True):
            await all_of(self._start(self.engines[index]) for index in own)

    async def _start(self, tracked: TrackedEngine) -> None:
        """Start an engine; one on standby leaves its GPUs again."""
        await tracked.engine.start()
        tracked.holds_gpus = True
        if tracked.standby:
            await tracked.engine.park()
            tracked.holds_gpus = False
            tracked.rest()
