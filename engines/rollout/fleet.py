"""The engines of a run and the tasks that wait for them, each of which reports to one inbox.

    pump        what happened on an engine
    wake        an engine has its GPUs, after the engines of other layouts have left them
    sync        an engine has the weights of its phase
    refresh     a parked engine has them
    park        an engine has left its GPUs
    restart     an engine is there again

Wake, sync, refresh and park are orders: an engine carries out its own one after the other. Whoever
serves the inbox decides; here is nothing decided but how often an engine may die.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain

from engines.rollout.interface import Engine, EngineDied, EngineEvents
from engines.rollout.stage import Phase
from engines.rollout.tracked_engine import Lane, now_s
from schemas.layout import Pool
from schemas.rollout import RequestId
from schemas.timeline import Doing
from schemas.weights import PolicyWeights


@dataclass(frozen=True, slots=True)
class Synced:
    """An engine has the weights of its phase."""

    canary_error: float | None
    """None: it had them before."""
    sync_s: float


class Refreshed(Synced):
    """A parked engine has the weights of the phase that its pool is at."""


class Woken:
    """An engine has its GPUs again."""


class Parked:
    """An engine has left its GPUs to others."""


class Restarted:
    """An engine is there again, empty."""


@dataclass(frozen=True, slots=True)
class Fatal:
    """An engine cannot be brought up again."""

    error: Exception


class Queued:
    """A phase has come."""


News = EngineEvents | Woken | Parked | Synced | Restarted | Fatal | Queued | Exception


class Fleet:
    """Starts engines, listens to them, and brings them up again when they die."""

    def __init__(
        self,
        engines: Sequence[Engine],
        max_restarts: int,
        pools: Sequence[Pool] = (),
        keep_parked_current: bool = True,
    ) -> None:
        """`keep_parked_current`: parked engines take weights too."""
        assert engines
        self.lanes = {engine.index: Lane(engine) for engine in engines}
        self.inbox: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        self.changed: set[int] = set()
        """Engines that may have nothing left to do."""
        self._pools = tuple(pools)
        for pool in pools:
            self._share_gpus(pool)
        self.base = [lane for lane in self.lanes.values() if not lane.standby]
        """Engines that phases begin on."""
        self._keep_parked_current = keep_parked_current
        self._max_restarts = max_restarts
        self._num_restarts = dict.fromkeys(self.lanes, 0)
        self._pumps: dict[int, asyncio.Task] = {}
        self._heard: dict[int, asyncio.Event] = {}
        self._orders: dict[int, list[asyncio.Task]] = {index: [] for index in self.lanes}
        """Not carried out yet."""
        self._parks: dict[int, asyncio.Task] = {}
        """The last one of each engine."""
        self._restarts: dict[int, asyncio.Task] = {}

    def _share_gpus(self, pool: Pool) -> None:
        """Those of the base work; the others are on standby."""
        layouts = {tp: [self.lanes[i] for i in own] for tp, own in pool.engines.items()}
        for tp_degree, own in layouts.items():
            for lane in own:
                assert not lane.mates, f"engine {lane.index} is in two pools"
                lane.standby = tp_degree != pool.base
                lane.mates = [
                    m for tp, others in layouts.items() if tp != tp_degree for m in others
                ]

    async def start(self) -> None:
        pooled = {i for pool in self._pools for own in pool.engines.values() for i in own}
        alone = [lane for index, lane in self.lanes.items() if index not in pooled]
        await all_of([*map(self._start, alone), *map(self._start_pool, self._pools)])

    async def shutdown(self) -> None:
        orders = [order for own in self._orders.values() for order in own]
        await cancel([*self._pumps.values(), *orders, *self._restarts.values()])
        await all_of(lane.engine.shutdown() for lane in self.lanes.values())

    @property
    def settled(self) -> bool:
        """No report is to come but of requests, and none is unread."""
        orders = (order for own in self._orders.values() for order in own)
        under_way = chain(orders, self._restarts.values())
        return self.inbox.empty() and all(task.done() for task in under_way)

    def take_changed(self) -> list[Lane]:
        """Those that may begin a phase now."""
        changed = [self.lanes[index] for index in self.changed if index in self.lanes]
        self.changed.clear()
        return list(dict.fromkeys(m for lane in changed for m in (lane, *lane.mates)))

    def at(self, phase: Phase) -> list[Lane]:
        """Engines at work on the phase, or waiting for another since they ended their part."""
        return [lane for lane in self.lanes.values() if lane.is_at(phase)]

    def holders(self, phase: Phase, id: RequestId) -> list[Lane]:
        """Those that have this request unfinished: several while it is raced. One on standby has it
        until it tells that it is finished."""
        lanes = self.lanes.values()
        return [m for m in lanes if m.alive and m.phase is phase and id in m.unfinished]

    def listen(self) -> None:
        """To every engine that is alive, until `stop_listening`."""
        for lane in self.lanes.values():
            if lane.alive:
                self._listen_to(lane)

    async def stop_listening(self) -> None:
        await cancel(self._pumps.values())
        self._pumps.clear()

    # Orders

    def sync(self, lane: Lane, weights: PolicyWeights, label: str) -> None:
        """Have the engine take these weights, if it has others. It is entering until it has."""
        lane.entering = True
        self._order(lane, partial(self._sync, lane, weights, label, Synced))

    def refresh(self, lane: Lane, weights: PolicyWeights, label: str) -> None:
        """Have a parked engine take these weights, if parked engines take any."""
        if self._keep_parked_current:
            self._order(lane, partial(self._sync, lane, weights, label, Refreshed))

    def park(self, lane: Lane) -> None:
        """Have the engine leave its GPUs."""
        self._parks[lane.index] = self._order(lane, partial(self._park, lane))

    def wake(self, lane: Lane) -> None:
        """Have the engine take its GPUs once its mates are parked. It is entering until then, and
        longer when it needs weights."""
        lane.entering = True
        lane.begin(Doing.SWITCH, lane.label)
        parks = [self._parks[mate.index] for mate in lane.mates if mate.index in self._parks]
        self._order(lane, partial(self._wake, lane), parks)

    def _order(
        self,
        lane: Lane,
        work: Callable[[], Awaitable[News]],
        others: Iterable[asyncio.Task] = (),
    ) -> asyncio.Task:
        """After its earlier orders and those `others`."""
        own = [order for order in self._orders[lane.index] if not order.done()]
        order = asyncio.create_task(self._carry_out(lane, work, {*own, *others}))
        self._orders[lane.index] = [*own, order]
        return order

    async def _carry_out(
        self,
        lane: Lane,
        work: Callable[[], Awaitable[News]],
        earlier: Set[asyncio.Task],
    ) -> None:
        try:
            if earlier:
                await asyncio.wait(earlier)
            news = await work()
        except Exception as failure:
            news = failure
        await self.inbox.put((lane.index, news))

    async def _sync(
        self, lane: Lane, weights: PolicyWeights, label: str, report: type[Synced]
    ) -> Synced:
        started_s, error = now_s(), None
        if lane.version != weights.policy_version:
            lane.begin(Doing.SYNC, label)
            error = await lane.engine.load_weights(weights)
            lane.version = weights.policy_version
        if lane.standby:
            lane.rest()
        return report(error, now_s() - started_s)

    async def _park(self, lane: Lane) -> Parked:
        await lane.engine.park()
        lane.parked = True
        return Parked()

    async def _wake(self, lane: Lane) -> Woken:
        if not lane.standby:
            lane.begin(Doing.SWITCH, lane.label)
        if not await lane.engine.wake():
            lane.version = None
        lane.parked = False
        return Woken()

    async def sync_all(self, weights: PolicyWeights) -> float:
        """Bring every engine to this policy version; one that dies of it is restarted.

        Returns the largest canary error. Raises `WeightSyncError` from any engine.
        """
        orders = [order for own in self._orders.values() for order in own]
        await asyncio.gather(*self._restarts.values(), *orders)
        lanes = [m for m in self.lanes.values() if self._keep_parked_current or not m.standby]
        return max(await all_of(self._insist(lane, weights) for lane in lanes))

    async def _insist(self, lane: Lane, weights: PolicyWeights) -> float:
        while True:
            try:
                error = await lane.engine.load_weights(weights)
            except EngineDied as death:
                self._count(death)
                await self._start_again(lane)
            else:
                lane.version = weights.policy_version
                return error

    # Deaths

    async def bury(self, lane: Lane, death: EngineDied) -> None:
        """Note a death and restart the engine meanwhile. Raises the death when there were enough
        of this engine in the run."""
        self._count(death)
        pump = self._pumps.pop(lane.index, None)
        await cancel([*([pump] if pump else []), *self._orders[lane.index]])
        self._orders[lane.index].clear()
        lane.die()
        lane.begin(Doing.RESTART)
        self._restarts[lane.index] = asyncio.create_task(self._restart(lane))

    def revive(self, lane: Lane) -> None:
        """After its restart. Its GPUs may have changed hands meanwhile."""
        lane.alive = True
        lane.rest()
        self._listen_to(lane)
        if lane.standby and not lane.parked:
            self.park(lane)
        elif lane.parked and not lane.standby:
            self.wake(lane)

    def _listen_to(self, lane: Lane) -> None:
        self._heard[lane.index] = asyncio.Event()
        self._pumps[lane.index] = asyncio.create_task(self._pump(lane.engine))

    def heard(self, index: int) -> None:
        """What the engine told is dealt with."""
        self._heard[index].set()

    async def _pump(self, engine: Engine) -> None:
        """Asks again when the last answer is dealt with: where that takes time, as it does with
        many engines, the next one tells of more."""
        try:
            while True:
                await self.inbox.put((engine.index, await engine.next_events()))
                await self._heard[engine.index].wait()
                self._heard[engine.index].clear()
        except Exception as error:
            # Whether this is a death or a failure of the phase is decided where it is read.
            await self.inbox.put((engine.index, error))

    async def _restart(self, lane: Lane) -> None:
        try:
            await self._start_again(lane)
            news: News = Restarted()
        except Exception as error:
            news = Fatal(error)
        await self.inbox.put((lane.index, news))

    async def _start_again(self, lane: Lane) -> None:
        while True:
            try:
                return await self._start(lane)
            except EngineDied as death:
                self._count(death)

    async def _start_pool(self, pool: Pool) -> None:
        """Layout after layout, since they share GPUs; the base, which stays there, comes last."""
        for _, own in sorted(pool.engines.items(), reverse=True):
            await all_of(self._start(self.lanes[index]) for index in own)

    async def _start(self, lane: Lane) -> None:
        lane.parked = False
        await lane.engine.start()
        if lane.standby:
            await self._park(lane)
            lane.rest()

    def _count(self, death: EngineDied) -> None:
        self._num_restarts[death.engine] += 1
        if self._num_restarts[death.engine] > self._max_restarts:
            raise death


async def all_of(awaitables: Iterable[Awaitable]) -> list:
    """Every result, or the first error once all the others have ended: nothing is left running."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def cancel(tasks: Iterable[asyncio.Task]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
