"""Runs rollout phases over several engines.

    roll_out ─► a queue per engine ─► enter: weights, then requests ─► a pump per engine ─► inbox
                                                                                            │
                          migrate, defer ◄─ decide (policies) ◄─ observe ◄──────────────────┘
                                                                                            │
                     requests go to engines of the same phase, the engine restarts ◄─ a death

Phases are served in the order in which they come, and overlap: an engine that has nothing left of
one begins the next at once, with the weights of that one and without waiting for the others
(RhymeRL, section 4.2). So all requests of a phase run under its own policy version, except those
deferred to it. A phase ends after the one before it.

The coordinator waits for the inbox alone; each pump's wait is bounded by its engine, so a phase
ends, or fails with the engine's name. A finished rollout is handed to `on_finished` before it
counts as finished.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

from engines.rollout.interface import Engine, EngineDied, EngineEvents
from engines.rollout.lane import Lane
from engines.rollout.moves import Defer, Migrate, Move, Policy, RolloutView
from engines.rollout.phase import OnFinished, OnProgress, Outcome, Phase, Tally
from schemas.rollout import DraftingCounts, RequestId, Rollout, RolloutRequest
from schemas.timeline import Doing, MoveRecord, Timeline
from schemas.weights import PolicyWeights


@dataclass(frozen=True, slots=True)
class _Entered:
    """An engine has the weights of its phase."""

    canary_error: float | None
    sync_s: float


class _Restarted:
    """An engine is there again, empty."""


@dataclass(frozen=True, slots=True)
class _Fatal:
    """An engine cannot be brought up again."""

    error: Exception


class _Queued:
    """A phase has come."""


_News = EngineEvents | _Entered | _Restarted | _Fatal | _Queued | Exception


class Coordinator:
    """Owns the engines of a run: starts them, keeps their weights current, rolls out."""

    def __init__(
        self, engines: Sequence[Engine], policies: Sequence[Policy] = (), max_restarts: int = 3
    ) -> None:
        """`policies` are those of phases that bring none of their own."""
        assert engines
        self._lanes = {engine.index: Lane(engine) for engine in engines}
        self._policies = tuple(policies)
        self._max_restarts = max_restarts
        self._num_restarts = dict.fromkeys(self._lanes, 0)
        self._phases: list[Phase] = []
        self._weights: PolicyWeights | None = None
        self._moves: list[MoveRecord] = []
        self._changed: set[int] = set()
        """Lanes that may begin another phase."""
        self._inbox: asyncio.Queue[tuple[int, _News]] = asyncio.Queue()
        self._serving: asyncio.Task | None = None
        self._pumps: dict[int, asyncio.Task] = {}
        self._entering: dict[int, asyncio.Task] = {}
        self._restarts: dict[int, asyncio.Task] = {}

    async def start(self) -> None:
        await _all(lane.engine.start() for lane in self._lanes.values())

    async def shutdown(self) -> None:
        tasks = [*self._pumps.values(), *self._entering.values(), *self._restarts.values()]
        await _cancel([*tasks, *([self._serving] if self._serving else [])])
        await _all(lane.engine.shutdown() for lane in self._lanes.values())

    async def load_weights(self, weights: PolicyWeights) -> float:
        """Bring every engine to this policy version between phases; one that dies of it is
        restarted.

        Returns the largest canary error. Raises `WeightSyncError` from any engine.
        """
        assert not self._phases, "engines take the weights of a phase when they begin it"
        await asyncio.gather(*self._restarts.values())
        self._weights = weights
        errors = await _all(self._sync(lane, weights) for lane in self._lanes.values())
        return max(errors)

    def roll_out(
        self,
        assignments: Sequence[tuple[int, RolloutRequest]],
        on_finished: OnFinished,
        on_progress: OnProgress | None = None,
        *,
        weights: PolicyWeights | None = None,
        policies: Sequence[Policy] | None = None,
        min_rollouts: int | None = None,
        label: str = "",
    ) -> "asyncio.Future[Outcome]":
        """Generate every request, starting on the engine it is assigned to.

        May be called while others are under way: it is queued behind them before this returns.
        `weights`: of the policy version to generate with; None: as `load_weights` was told.
        `min_rollouts`: requests that must finish in this phase; the others may be deferred to the
        phase queued next, where that one has such a bound too. None: all, and none is taken over.

        The future raises `EngineDied` when an engine dies more often than `max_restarts` in a
        run, and `WeightSyncError`; then every phase under way fails.
        """
        weights = weights or self._weights
        assert weights is not None, "weights come first"
        queues: dict[int, list[RolloutRequest]] = {index: [] for index in self._lanes}
        for index, request in assignments:
            queues[index].append(request)
        phase = Phase(
            label=label,
            weights=weights,
            queues=queues,
            on_finished=on_finished,
            on_progress=on_progress,
            policies=self._policies if policies is None else policies,
            min_rollouts=min_rollouts,
            done=asyncio.get_running_loop().create_future(),
            tallies={index: Tally() for index in self._lanes},
            num_rollouts=len(assignments),
        )
        self._phases.append(phase)
        for lane in self._lanes.values():
            lane.waiting.append(phase)
        self._inbox.put_nowait((-1, _Queued()))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return phase.done

    def timeline(self, start_s: float, end_s: float) -> Timeline:
        """What the engines did between two times of the event loop's clock; what was before is
        forgotten."""
        for lane in self._lanes.values():
            lane.spans = [s for s in lane.spans if s.end_s is None or s.end_s > start_s]
        self._moves = [move for move in self._moves if move.at_s > start_s]
        return Timeline(
            start_s=start_s,
            end_s=end_s,
            engines=tuple(self._lanes),
            spans=tuple(
                replace(span)
                for lane in self._lanes.values()
                for span in lane.spans
                if span.start_s < end_s
            ),
            moves=tuple(move for move in self._moves if move.at_s <= end_s),
        )

    # Serving

    async def _serve(self) -> None:
        # A phase may come while the pumps of those before it are being stopped.
        while self._phases:
            for lane in self._lanes.values():
                if lane.alive:
                    self._start_pump(lane)
            try:
                while self._phases:
                    index, news = await self._inbox.get()
                    await self._handle(index, news)
                    await self._end_phases()
                    await self._enter_phases()
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                await _cancel(self._pumps.values())
                self._pumps.clear()

    async def _handle(self, index: int, news: _News) -> None:
        self._changed.add(index)
        match news:
            case _Queued():
                self._changed.update(self._lanes)
            case _Fatal():
                raise news.error
            case EngineEvents():
                await self._on_events(self._lanes[index], news)
            case _Entered():
                await self._on_entered(self._lanes[index], news)
            case _Restarted():
                self._on_restarted(self._lanes[index])
            case Exception():
                await self._on_death(self._lanes[index], news)

    def _fail(self, error: BaseException) -> None:
        for phase in self._phases:
            if not phase.done.done():
                phase.done.set_exception(error)
        self._phases.clear()
        for lane in self._lanes.values():
            lane.waiting.clear()

    def _start_pump(self, lane: Lane) -> None:
        self._pumps[lane.index] = asyncio.create_task(self._pump(lane.engine))

    async def _pump(self, engine: Engine) -> None:
        try:
            while True:
                await self._inbox.put((engine.index, await engine.next_events()))
        except Exception as error:
            # The coordinator decides whether this is a death or a failure of the phase.
            await self._inbox.put((engine.index, error))

    # From phase to phase

    async def _enter_phases(self) -> None:
        changed = [self._lanes[index] for index in self._changed if index in self._lanes]
        self._changed.clear()
        for lane in changed:
            while lane.free and lane.waiting:
                if lane.phase in self._phases:
                    lane.tally.drafting = await _counts(lane)
                lane.rest(_now_s())
                lane.phase = lane.waiting.popleft()
                self._enter(lane)

    def _enter(self, lane: Lane) -> None:
        """Take the phase's weights, and its requests once they are there."""
        phase = lane.phase
        assert phase is not None
        lane.expect(phase.queues.pop(lane.index))
        if not lane.unfinished and phase.num_unfinished == 0:
            return
        lane.entering = True
        self._entering[lane.index] = asyncio.create_task(self._take_weights(lane, phase))

    async def _take_weights(self, lane: Lane, phase: Phase) -> None:
        started_s, error = _now_s(), None
        try:
            if lane.version != phase.weights.policy_version:
                lane.begin(Doing.SYNC, started_s, phase.label)
                error = await lane.engine.load_weights(phase.weights)
                lane.version = phase.weights.policy_version
            news: _News = _Entered(error, _now_s() - started_s)
        except Exception as failure:
            news = failure
        await self._inbox.put((lane.index, news))

    async def _on_entered(self, lane: Lane, entered: _Entered) -> None:
        phase = lane.phase
        assert phase is not None
        lane.entering = False
        lane.rest(_now_s())
        if entered.canary_error is not None:
            phase.canary_errors.append(entered.canary_error)
            phase.sync_s = max(phase.sync_s, entered.sync_s)
        phase.began_s = min(phase.began_s, _now_s())
        await self._submit(lane, list(lane.unfinished.values()))

    async def _end_phases(self) -> None:
        while self._phases and self._phases[0].num_unfinished == 0:
            phase = self._phases[0]
            for lane in self._lanes.values():
                if lane.phase is phase and not lane.entering:
                    phase.tallies[lane.index].drafting = await _counts(lane)
            del self._phases[0]
            if not phase.done.done():
                phase.done.set_result(phase.outcome(_now_s()))

    # Requests

    async def _submit(self, lane: Lane, requests: list[RolloutRequest]) -> None:
        if not requests:
            return
        assert lane.phase is not None
        lane.begin(Doing.ROLLOUT, _now_s(), lane.phase.label)
        try:
            await lane.engine.submit(requests)
        except EngineDied:
            if not lane.alive:
                raise
            # Its pump reports the same death, and `_on_death` resubmits.

    async def _give(self, lane: Lane, requests: list[RolloutRequest]) -> None:
        """Add to what it does in its present phase."""
        lane.expect(requests)
        if lane.takes_requests:
            await self._submit(lane, requests)

    async def _on_events(self, lane: Lane, events: EngineEvents) -> None:
        phase, now_s = lane.phase, _now_s()
        if phase is None or lane.entering:
            return
        finished = [r for r in events.finished if lane.forget(r.request.id)]
        lane.progress = events.progress
        lane.seen = None
        if finished:
            await self._on_finished(lane, phase, finished, now_s)
        if phase.watched and phase in self._phases:
            view = self._view(phase, now_s)
            if phase.on_progress:
                phase.on_progress(view)
            for policy in phase.policies:
                for move in policy.decide(view):
                    await self._move(phase, move)

    async def _on_finished(
        self, lane: Lane, phase: Phase, finished: list[Rollout], now_s: float
    ) -> None:
        tally = lane.tally
        tally.num_rollouts += len(finished)
        tally.num_tokens += sum(len(r.generated.token_ids) for r in finished)
        if not lane.unfinished:
            lane.rest(now_s)
        await phase.on_finished(finished)
        phase.num_finished += len(finished)

    def _view(self, phase: Phase, now_s: float) -> RolloutView:
        lanes = [lane for lane in self._lanes.values() if lane.alive and lane.phase is phase]
        return RolloutView(
            elapsed_s=now_s - min(phase.began_s, now_s),
            engines=tuple(lane.view() for lane in lanes),
            num_finished=phase.num_finished,
            num_rollouts=phase.num_rollouts,
            num_deferrable=phase.num_deferrable if self._after(phase) else 0,
        )

    def _after(self, phase: Phase) -> Phase | None:
        """The next phase, if requests can be deferred to it."""
        at = self._phases.index(phase) + 1
        later = self._phases[at] if at < len(self._phases) else None
        return later if later and later.min_rollouts is not None else None

    # Moves

    async def _move(self, phase: Phase, move: Move) -> None:
        """Make a move that is still possible."""
        origin = next((lane for lane in self._of(phase) if move.id in lane.unfinished), None)
        target = self._lanes[move.to_engine]
        if origin is None:
            return
        match move:
            case Migrate():
                if target is not origin and target in self._of(phase):
                    await self._migrate(phase, origin, target, move.id)
            case Defer():
                later = self._after(phase)
                if later is not None and phase.num_deferrable:
                    await self._defer(phase, later, origin, target, move.id)

    def _of(self, phase: Phase) -> list[Lane]:
        """Engines at work on the phase."""
        return [lane for lane in self._lanes.values() if lane.alive and lane.phase is phase]

    async def _migrate(self, phase: Phase, origin: Lane, target: Lane, id: RequestId) -> None:
        for request in await self._take(origin, id):
            phase.num_migrated += 1
            self._note(request, origin, target, deferred=False)
            phase.tallies[target.index].num_received += 1
            await self._give(target, [request])

    async def _defer(
        self, phase: Phase, later: Phase, origin: Lane, target: Lane, id: RequestId
    ) -> None:
        if origin.unfinished[id].deferred_from is not None:
            return
        for request in await self._take(origin, id):
            deferred = phase.leave_to(later, request)
            self._note(request, origin, target, deferred=True)
            if target.phase is later:
                await self._give(target, [deferred])
            else:
                # One that has done its part of the later phase already has no queue there.
                index = target.index if target.index in later.queues else origin.index
                later.queues[index].append(deferred)

    def _note(self, request: RolloutRequest, origin: Lane, target: Lane, *, deferred: bool) -> None:
        num_tokens = len(request.generated.token_ids) if request.generated else 0
        self._moves.append(
            MoveRecord(request.id, origin.index, target.index, deferred, _now_s(), num_tokens)
        )

    async def _take(self, origin: Lane, id: RequestId) -> list[RolloutRequest]:
        """The request from its engine; nothing when it has finished meanwhile."""
        if origin.entering:
            request = origin.unfinished[id]
            origin.forget(id)
            return [request]
        try:
            taken = await origin.engine.withdraw([id])
        except EngineDied:
            return []  # Its pump reports the death, and the request starts afresh elsewhere.
        for request in taken:
            origin.forget(request.id)
        if not origin.unfinished:
            origin.rest(_now_s())
            self._changed.add(origin.index)
        return taken

    # Deaths

    async def _on_death(self, lane: Lane, error: BaseException) -> None:
        if not isinstance(error, EngineDied):
            raise error
        if not lane.alive:
            return  # The pump and the weight sync both met the same death.
        self._count_restart(error)
        tasks = [tasks.pop(lane.index, None) for tasks in (self._pumps, self._entering)]
        await _cancel([task for task in tasks if task])
        lane.alive, lane.entering, lane.version = False, False, None
        lane.begin(Doing.RESTART, _now_s())
        self._restarts[lane.index] = asyncio.create_task(self._restart(lane))
        if lane.phase is not None and lane.phase in self._phases:
            lane.tally.num_restarts += 1
            await self._rescue(lane, lane.phase)

    async def _rescue(self, lane: Lane, phase: Phase) -> None:
        """Spread its requests over the engines that are at the same phase or have yet to come to
        it; without one they wait for the restart."""
        orphans = list(lane.unfinished.values())
        others = [
            other
            for other in self._lanes.values()
            if other.alive and (other.phase is phase or phase in other.waiting)
        ]
        if not others:
            return
        lane.unfinished, lane.seen = {}, None
        for i, other in enumerate(others):
            share = orphans[i :: len(others)]
            if other.phase is phase:
                await self._give(other, share)
            else:
                phase.queues[other.index].extend(share)

    async def _restart(self, lane: Lane) -> None:
        try:
            await self._start_again(lane)
            news: _News = _Restarted()
        except Exception as error:
            news = _Fatal(error)
        await self._inbox.put((lane.index, news))

    async def _start_again(self, lane: Lane) -> None:
        while True:
            try:
                return await lane.engine.start()
            except EngineDied as death:
                self._count_restart(death)

    def _on_restarted(self, lane: Lane) -> None:
        lane.alive = True
        lane.rest(_now_s())
        self._start_pump(lane)
        if lane.phase is not None and lane.phase in self._phases:
            lane.phase.queues[lane.index] = []
            self._enter(lane)

    async def _sync(self, lane: Lane, weights: PolicyWeights) -> float:
        while True:
            try:
                error = await lane.engine.load_weights(weights)
            except EngineDied as death:
                self._count_restart(death)
                await self._start_again(lane)
            else:
                lane.version = weights.policy_version
                return error

    def _count_restart(self, death: EngineDied) -> None:
        """Raises the death when this engine has been restarted often enough in the run."""
        self._num_restarts[death.engine] += 1
        if self._num_restarts[death.engine] > self._max_restarts:
            raise death


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _counts(lane: Lane) -> DraftingCounts:
    """Of the phase that it leaves, with what its earlier life had counted."""
    try:
        new = await lane.engine.take_drafting_counts()
    except EngineDied:
        # All its rollouts are there; the next call meets the death and mends it.
        return lane.tally.drafting
    old = lane.tally.drafting
    return DraftingCounts(*(getattr(old, f.name) + getattr(new, f.name) for f in fields(old)))


async def _all(awaitables: Iterable[Awaitable]) -> list:
    """Every result, or the first error once all the others have ended: nothing is left running."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def _cancel(tasks: Iterable[asyncio.Task]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
