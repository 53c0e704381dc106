"""The engines of a run and the tasks that wait for them, each of which reports to one inbox.

    pump        what happened on an engine
    weights     an engine has the weights of its phase
    restart     an engine is there again

Whoever serves the inbox decides; here is nothing decided but how often an engine may die.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass

from engines.rollout.interface import Engine, EngineDied, EngineEvents
from engines.rollout.lane import Lane, now_s
from engines.rollout.phase import Phase
from schemas.rollout import RequestId
from schemas.timeline import Doing
from schemas.weights import PolicyWeights


@dataclass(frozen=True, slots=True)
class Entered:
    """An engine has the weights of its phase."""

    canary_error: float | None
    """None: it had them before."""
    sync_s: float


class Restarted:
    """An engine is there again, empty."""


@dataclass(frozen=True, slots=True)
class Fatal:
    """An engine cannot be brought up again."""

    error: Exception


class Queued:
    """A phase has come."""


News = EngineEvents | Entered | Restarted | Fatal | Queued | Exception


class Fleet:
    """Starts engines, listens to them, and brings them up again when they die."""

    def __init__(self, engines: Sequence[Engine], max_restarts: int) -> None:
        assert engines
        self.lanes = {engine.index: Lane(engine) for engine in engines}
        self.inbox: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        self._max_restarts = max_restarts
        self._num_restarts = dict.fromkeys(self.lanes, 0)
        self._pumps: dict[int, asyncio.Task] = {}
        self._syncs: dict[int, asyncio.Task] = {}
        self._restarts: dict[int, asyncio.Task] = {}

    async def start(self) -> None:
        await all_of(lane.engine.start() for lane in self.lanes.values())

    async def shutdown(self) -> None:
        await cancel([*self._pumps.values(), *self._syncs.values(), *self._restarts.values()])
        await all_of(lane.engine.shutdown() for lane in self.lanes.values())

    def at(self, phase: Phase) -> list[Lane]:
        """Engines at work on the phase, or waiting for another since they ended their part."""
        return [lane for lane in self.lanes.values() if lane.is_at(phase)]

    def holders(self, phase: Phase, id: RequestId) -> list[Lane]:
        """Those among them that have this request unfinished: several while it is raced."""
        return [lane for lane in self.at(phase) if id in lane.unfinished]

    def listen(self) -> None:
        """To every engine that is alive, until `stop_listening`."""
        for lane in self.lanes.values():
            if lane.alive:
                self._listen_to(lane)

    async def stop_listening(self) -> None:
        await cancel(self._pumps.values())
        self._pumps.clear()

    def sync(self, lane: Lane, weights: PolicyWeights, label: str) -> None:
        """Have the engine take these weights, if it has others."""
        self._syncs[lane.index] = asyncio.create_task(self._sync(lane, weights, label))

    async def sync_all(self, weights: PolicyWeights) -> float:
        """Bring every engine to this policy version; one that dies of it is restarted.

        Returns the largest canary error. Raises `WeightSyncError` from any engine.
        """
        await asyncio.gather(*self._restarts.values(), *self._syncs.values())
        return max(await all_of(self._insist(lane, weights) for lane in self.lanes.values()))

    async def bury(self, lane: Lane, death: EngineDied) -> None:
        """Note a death and restart the engine meanwhile. Raises the death when there were enough
        of this engine in the run."""
        self._count(death)
        tasks = [tasks.pop(lane.index, None) for tasks in (self._pumps, self._syncs)]
        await cancel(task for task in tasks if task)
        lane.alive, lane.entering, lane.version = False, False, None
        lane.begin(Doing.RESTART)
        self._restarts[lane.index] = asyncio.create_task(self._restart(lane))

    def revive(self, lane: Lane) -> None:
        """After its restart."""
        lane.alive = True
        lane.rest()
        self._listen_to(lane)

    def _listen_to(self, lane: Lane) -> None:
        self._pumps[lane.index] = asyncio.create_task(self._pump(lane.engine))

    async def _pump(self, engine: Engine) -> None:
        try:
            while True:
                await self.inbox.put((engine.index, await engine.next_events()))
        except Exception as error:
            # Whether this is a death or a failure of the phase is decided where it is read.
            await self.inbox.put((engine.index, error))

    async def _sync(self, lane: Lane, weights: PolicyWeights, label: str) -> None:
        started_s, error = now_s(), None
        try:
            if lane.version != weights.policy_version:
                lane.begin(Doing.SYNC, label)
                error = await lane.engine.load_weights(weights)
                lane.version = weights.policy_version
            news: News = Entered(error, now_s() - started_s)
        except Exception as failure:
            news = failure
        await self.inbox.put((lane.index, news))

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
                return await lane.engine.start()
            except EngineDied as death:
                self._count(death)

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
