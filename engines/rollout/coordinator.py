"""The coordinator runs rollout stages on several engines.

    roll_out ─► a queue per engine ─► enter: weights, then requests ─► engine ─► inbox
                                                                                   │
                           moves ◄─ decide (policies) ◄─ observe ◄─────────────────┤
                                                                                   │
          requests move to engines of the same stage, the engine restarts ◄─ a death
                         or is gone, if the cluster has no room for it ◄─┘

Engines can share GPUs as the layouts of a pool. One layout works while the others are on standby.
Only engines of the base layout have queues, and views leave out engines on standby. A policy with
`begin` (`FirstLayout`) may choose another layout for a stage when nothing else is under way.

Stages run in the order of `roll_out` calls, and they overlap. An engine that has finished its part
of one stage loads the weights of the next and begins it, without waiting for the other engines
(RhymeRL, section 4.2). So all requests of a stage run under its own policy version, except those
deferred to it. Between stages that are `in_flight` it need not finish its part, if nothing waits:
it pauses, loads the weights, and its requests go on with them, so that its batch stays full
(AReaL, arXiv:2505.24298, section 4.1). A stage ends after the one before it.

The coordinator waits only for the inbox. Every call to an engine has a time limit, so a stage
ends, or fails with an error that names the engine. A rollout counts as finished once `on_finished`
has stored it. If its tokens were lost before that, the coordinator treats the engine as dead and
generates the rollout again. After the last stage it reads the inbox until all engines are settled.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

from refrain.engines.bounded import cancel
from refrain.engines.rollout import gpu_handover, mover, orders, reassign, slow_policy
from refrain.engines.rollout.deaths import MAX_RESTARTS
from refrain.engines.rollout.engine_reports import (
    Copied,
    EngineReport,
    Fatal,
    Refreshed,
    Signal,
    Synced,
)
from refrain.engines.rollout.fleet import Fleet
from refrain.engines.rollout.interface import Engine, EngineDied, EngineEvents, EngineGone, Finished
from refrain.engines.rollout.moves import MovesKV, Policy, moves_long
from refrain.engines.rollout.preparations import Preparation
from refrain.engines.rollout.reshape import Reshaper
from refrain.engines.rollout.stage import GenerationStage, OnFinished, OnProgress, Outcome, Recover
from refrain.engines.rollout.storing import Storing
from refrain.engines.rollout.tracked_engine import TrackedEngine, now_s
from refrain.engines.rollout.views import queued_view, stage_view
from refrain.schemas.layout import Pool
from refrain.schemas.rollout import RolloutRequest
from refrain.schemas.timeline import Timeline
from refrain.schemas.weights import PolicyWeights


class Coordinator:
    """Owner of a run's engines: starts them, keeps their weights current, generates rollouts."""

    def __init__(
        self,
        engines: Sequence[Engine],
        policies: Sequence[Policy] = (),
        max_restarts: int = MAX_RESTARTS,
        pools: Sequence[Pool] = (),
        keep_parked_current: bool = True,
        log: Callable[[str], None] = lambda _: None,
        *,
        decide_in_thread: bool = False,
    ) -> None:
        """Coordinate these engines. `policies`: default for stages without their own.
        `decide_in_thread`: run policies in a thread, so that they do not block the event loop.
        `keep_parked_current`: engines on standby load each policy version with the others. If
        False, they load it when they wake. `log` gets a message for each restart or lost engine.
        """
        self._fleet = Fleet(engines, max_restarts, pools, keep_parked_current, log)
        self._engines = self._fleet.engines
        self._reshaper = Reshaper(self._fleet, pools)
        self._storing = Storing(self._fleet)
        self._policies = tuple(policies)
        self._stages: list[GenerationStage] = []
        self._numbers = count()
        self._weights: PolicyWeights | None = None
        self._on_gpus = True
        self._decide_in_thread = decide_in_thread
        self._serving: asyncio.Task | None = None

    async def start(self) -> None:
        await self._fleet.start()

    async def shutdown(self) -> None:
        if self._serving:
            await cancel([self._serving])
        await self._fleet.shutdown()

    async def load_weights(self, weights: PolicyWeights) -> float:
        """Load this policy version into every engine, between stages. See `Fleet.sync_all`."""
        await self._settle()
        self._weights = weights
        return await self._fleet.sync_all(weights)

    async def leave_gpus(self) -> None:
        """Release the GPUs to the trainer, between stages."""
        await self._settle()
        self._on_gpus = False
        await gpu_handover.leave(self._fleet)

    async def enter_gpus(self) -> None:
        """Take the GPUs back from the trainer. The next stage loads weights."""
        await self._settle()
        await gpu_handover.enter(self._fleet)
        self._on_gpus = True

    async def _settle(self) -> None:
        assert not self._stages, "a stage is under way"
        if self._serving:
            await self._serving

    def roll_out(
        self,
        assignments: Sequence[tuple[int | None, RolloutRequest]],
        on_finished: OnFinished,
        on_progress: OnProgress | None = None,
        *,
        weights: PolicyWeights | None = None,
        policies: Sequence[Policy] | None = None,
        min_rollouts: int | None = None,
        in_flight: bool = False,
        moves_kv: MovesKV = moves_long,
        recover: Recover | None = None,
        label: str = "",
    ) -> "asyncio.Future[Outcome]":
        """Queue a stage that generates every request, and return the future of its outcome.

        A request starts on its assigned engine, or on another one if that is gone or its GPUs are
        in another layout. Without an engine it waits until a policy starts it (`moves.Start`).
        `weights`: policy version to generate with; default: that of `load_weights`.
        `min_rollouts`: requests that must finish in this stage. The rest may be deferred to a next
        stage that sets `min_rollouts` too. None: none is deferred from or to this stage.
        `in_flight`, `moves_kv`, `recover`: see `GenerationStage`.

        Raises RuntimeError while the trainer has the GPUs, `EngineGone` when no engine is left. The
        future raises `EngineDied` when one engine dies more than `max_restarts` times in a run, or
        `WeightSyncError`. Either error fails every stage under way.
        """
        weights = weights or self._weights
        assert weights is not None, "weights come first"
        if not self._on_gpus:
            raise RuntimeError("the trainer has the GPUs: take the engines' turn to roll out")
        begin = self._fleet.remaining()
        waiting = {request.id: request for index, request in assignments if index is None}
        placed = [(index, request) for index, request in assignments if index is not None]
        stage = GenerationStage(
            number=next(self._numbers),
            label=label,
            weights=weights,
            queues=self._reshaper.queues(placed, begin),
            on_finished=on_finished,
            on_progress=on_progress,
            policies=self._policies if policies is None else policies,
            min_rollouts=min_rollouts,
            done=asyncio.get_running_loop().create_future(),
            tallies=self._fleet.new_tallies(),
            num_rollouts=len(assignments),
            in_flight=in_flight,
            moves_kv=moves_kv,
            recover=recover,
            waiting=waiting,
        )
        self._stages.append(stage)
        for tracked in begin:
            tracked.waiting.append(stage)
        self._fleet.inbox.put_nowait((-1, Signal.QUEUED))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return stage.done

    def timeline(self, start_s: float, end_s: float, kept_s: float | None = None) -> Timeline:
        """Return the engines' timeline between two times of the event loop's clock. Delete records
        from before `kept_s`, by default `start_s`."""
        kept_s = start_s if kept_s is None else kept_s
        return self._fleet.timeline_log.timeline(start_s, end_s, kept_s)

    @property
    def living(self) -> tuple[int, ...]:
        """Engines that a stage can begin on. If all are gone, return all of them: `roll_out` then
        raises the error."""
        living = tuple(tracked.index for tracked in self._fleet.base if not tracked.gone)
        return living or tuple(tracked.index for tracked in self._fleet.base)

    # Serving

    async def _serve(self) -> None:
        # A stage may have arrived while the pumps were stopping: serve it too.
        while self._stages:
            self._fleet.listen()
            try:
                while self._stages or not self._fleet.settled:
                    await self._handle(*await self._fleet.inbox.get())
                    await self._reshaper.settle()
                    await self._end_stages()
                    await self._open_stage()
                    await self._enter_stages()
            except Exception as error:
                self._fail(error)
            finally:
                await self._storing.stop()
                await self._fleet.stop_listening()

    async def _handle(self, index: int, report: EngineReport) -> None:
        self._fleet.changed.add(index)
        match report:
            case Signal.QUEUED:
                self._fleet.changed.update(self._engines)
            case EngineEvents():
                await self._on_events(self._engines[index], report)
                self._fleet.listen_to(self._engines[index])
            case Refreshed():
                self._on_refreshed(self._engines[index], report)
            case Synced():
                self._on_refreshed(self._engines[index], report)
                await self._on_awake(self._engines[index])
            case Copied(of=Preparation() as preparation):
                await mover.note_copied(self._fleet, preparation, report.copies)
            case Copied():
                await self._reshaper.note_copied(self._engines[index], report)
            case Signal.WOKEN:
                self._reshaper.note_woken(self._engines[index])
                await self._on_awake(self._engines[index])
            case Signal.RESTARTED:
                self._on_restarted(self._engines[index])
            case Fatal():
                raise report.error
            case EngineGone():
                await reassign.on_gone(self._fleet, self._stages, self._engines[index], report)
            case EngineDied():
                await self._on_death(self._engines[index], report)
            case Exception():
                raise report

    def _fail(self, error: Exception) -> None:
        if not self._stages:  # Keep the error for the next stage, which then fails.
            self._fleet.inbox.put_nowait((-1, Fatal(error)))
        for stage in self._stages:
            if not stage.done.done():
                stage.done.set_exception(error)
            stage.waiting.clear()
        self._stages.clear()
        for tracked in self._engines.values():
            tracked.waiting.clear()

    # From stage to stage

    async def _open_stage(self) -> None:
        """Ask policies for the stage's first layouts, if no other stage is under way."""
        stage, *others = self._stages or [None]
        if stage is None or stage.opened or others:
            return
        stage.opened = True
        view = queued_view(self._fleet, stage)
        for policy in stage.policies:
            for move in await slow_policy.begin(policy, view, in_thread=self._decide_in_thread):
                await self._reshaper.begin(stage, move)

    async def _enter_stages(self) -> None:
        """Let engines that are free load the weights of their next stage. `_on_awake` follows."""
        for tracked in self._fleet.take_changed():
            while tracked.free and tracked.waiting:
                if tracked.stage in self._stages:
                    await tracked.count()
                stage = tracked.waiting.popleft()
                await tracked.begin_stage(stage)
                tracked.expect(stage.queues.pop(tracked.index, ()))
                # Load weights even without requests: others may move here until the stage ends.
                if stage in self._stages:
                    tracked.enter()
                    self._fleet.order(orders.sync, tracked, stage)
                self._follow(tracked, stage)

    def _follow(self, tracked: TrackedEngine, stage: GenerationStage) -> None:
        """Also load the weights into the engines of other layouts on these GPUs, so that a later
        switch need not wait for them."""
        for sharer in tracked.gpu_sharers:
            if sharer.stage is not stage:
                sharer.stage = stage
                self._refresh(sharer)

    def _refresh(self, tracked: TrackedEngine) -> None:
        if tracked.alive and tracked.stage in self._stages:
            self._fleet.refresh(tracked, tracked.stage)

    def _on_refreshed(self, tracked: TrackedEngine, synced: Synced) -> None:
        assert tracked.stage is not None
        if synced.canary_error is not None:
            tracked.stage.canary_errors.append(synced.canary_error)
            tracked.stage.sync_s = max(tracked.stage.sync_s, synced.sync_s)

    async def _on_awake(self, tracked: TrackedEngine) -> None:
        """Submit the requests that wait for this engine, or first load the weights it lacks."""
        if not tracked.entering:
            return  # The engine died meanwhile, or another layout took its GPUs.
        stage = tracked.stage
        if stage is None:
            tracked.serve()  # Its pool switched layouts before the first stage.
            return
        if self._lacks_weights(tracked, stage):
            self._fleet.order(orders.sync, tracked, stage)
            return
        tracked.serve()
        stage.began_s = min(stage.began_s, now_s())
        await tracked.submit(tracked.pending)
        if stage.waiting:
            await self._decide(stage)

    def _lacks_weights(self, tracked: TrackedEngine, stage: GenerationStage) -> bool:
        """Whether the engine must load the stage's weights. Not if it has finished its part and can
        begin the next stage. Until it can, other requests may still move to it."""
        goes_on = tracked.waiting and tracked.has_finished_part
        needed = stage in self._stages and not goes_on
        return needed and tracked.version != stage.weights.policy_version

    async def _end_stages(self) -> None:
        while self._stages and self._stages[0].num_unfinished == 0:
            stage = self._stages[0]
            for tracked in self._engines.values():
                if tracked.stage is stage and tracked.takes_requests:
                    await tracked.count()
            del self._stages[0]
            if not stage.done.done():
                stage.done.set_result(stage.outcome(now_s()))

    # Requests

    async def _on_events(self, tracked: TrackedEngine, events: EngineEvents) -> None:
        stage = tracked.stage
        if stage is None or (tracked.entering and not tracked.finishing):
            return
        finished: dict[GenerationStage, list[tuple[Finished, RolloutRequest]]] = {stage: []}
        for rollout in events.finished:
            of = tracked.stage_of(rollout.id) or stage
            if request := tracked.forget(rollout.id):
                finished.setdefault(of, []).append((rollout, request))
            else:
                of.races.check(rollout)
        tracked.update_progress(events)
        lost: EngineDied | None = None
        for of, pairs in finished.items():
            try:
                await self._on_finished(tracked, of, [rollout for rollout, _ in pairs])
            except EngineDied as death:
                tracked.expect((r for _, r in pairs), None if of is stage else of)
                lost = death
        if lost:
            await self._on_death(tracked, lost)
        for of in finished:
            if of in self._stages:
                await self._decide(of, of.on_progress)

    async def _decide(self, stage: GenerationStage, on_progress: OnProgress | None = None) -> None:
        """Report progress, and make the moves that the stage's policies decide on."""
        waited = bool(stage.waiting)
        if on_progress or stage.policies:
            view = stage_view(self._fleet, stage, self._after(stage))
            if on_progress:
                on_progress(view)
            for policy in stage.policies:
                moves = await slow_policy.decide(policy, view, in_thread=self._decide_in_thread)
                if moves:
                    await mover.make(self._fleet, self._reshaper, stage, self._after(stage), moves)
                    view = stage_view(self._fleet, stage, self._after(stage))
        if stage.waiting:
            await mover.occupy(self._fleet, stage)
        if waited and not stage.waiting:  # Its engines may begin the next stage in flight.
            self._fleet.changed.update(tracked.index for tracked in self._fleet.at(stage))

    async def _on_finished(
        self, tracked: TrackedEngine, stage: GenerationStage, finished: list[Finished]
    ) -> None:
        """Store the rollouts first. Then count them, and withdraw their copies elsewhere."""
        if not finished:
            return
        await self._storing.store(tracked, stage, finished)
        self._fleet.deaths.note_work(tracked.index)
        tally = stage.tallies[tracked.index]
        tally.num_rollouts += len(finished)
        tally.num_tokens += sum(rollout.num_tokens for rollout in finished)
        stage.num_finished += len(finished)
        stage.finished.update((rollout.id, rollout.num_tokens) for rollout in finished)
        await mover.end_races(self._fleet, stage, finished)

    def _after(self, stage: GenerationStage) -> GenerationStage | None:
        """Return the next stage, if it is queued."""
        at = self._stages.index(stage) + 1
        return self._stages[at] if at < len(self._stages) else None

    # Deaths

    async def _on_death(self, tracked: TrackedEngine, death: EngineDied) -> None:
        await reassign.on_death(self._fleet, self._reshaper, self._stages, tracked, death)

    def _on_restarted(self, tracked: TrackedEngine) -> None:
        self._fleet.revive(tracked)
        if tracked.standby:
            self._refresh(tracked)
        elif tracked.takes_requests and tracked.stage in self._stages:
            tracked.enter()
            self._fleet.order(orders.sync, tracked, tracked.stage)
