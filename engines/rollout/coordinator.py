"""Runs rollout phases over several engines.

    roll_out ─► a queue per engine ─► enter: weights, then requests ─► engine ─► inbox
                                                                                   │
                           moves ◄─ decide (policies) ◄─ observe ◄─────────────────┤
                                                                                   │
            requests go to engines of the same phase, the engine restarts ◄─ a death

Engines that share GPUs work in turn: those of one layout of their pool, while the others are on
standby. Only those of the base have queues, and no view shows one that is on standby.

Phases are served in the order in which they come, and overlap: an engine that has nothing left of
one begins the next at once, with the weights of that one and without waiting for the others
(RhymeRL, section 4.2). So all requests of a phase run under its own policy version, except those
deferred to it. A phase ends after the one before it.

The coordinator waits for the inbox alone; each wait behind it is bounded by its engine, so a phase
ends, or fails with the engine's name. A finished rollout is handed to `on_finished` before it
counts as finished. After the last phase the inbox is served until every engine has settled.
"""

import asyncio
from collections.abc import Sequence

from engines.rollout.fleet import (
    Fatal,
    Fleet,
    News,
    Queued,
    Refreshed,
    Restarted,
    Synced,
    Woken,
    all_of,
    cancel,
)
from engines.rollout.interface import Engine, EngineDied, EngineEvents
from engines.rollout.mover import Mover
from engines.rollout.moves import Policy, RolloutView
from engines.rollout.recorder import Journal
from engines.rollout.reshape import Reshaper
from engines.rollout.stage import OnFinished, OnProgress, Outcome, Phase, Tally
from engines.rollout.tracked_engine import Lane, now_s
from schemas.layout import Pool
from schemas.rollout import Rollout, RolloutRequest
from schemas.timeline import Timeline
from schemas.weights import PolicyWeights


class Coordinator:
    """Owns the engines of a run: starts them, keeps their weights current, rolls out."""

    def __init__(
        self,
        engines: Sequence[Engine],
        policies: Sequence[Policy] = (),
        max_restarts: int = 3,
        pools: Sequence[Pool] = (),
        keep_parked_current: bool = True,
    ) -> None:
        """`policies` are those of phases that bring none of their own. `keep_parked_current`:
        engines on standby take weights with the others; otherwise when it is their turn."""
        self._fleet = Fleet(engines, max_restarts, pools, keep_parked_current)
        self._lanes = self._fleet.lanes
        self._journal = Journal(self._lanes.values())
        self._reshaper = Reshaper(self._fleet, pools, self._journal)
        self._mover = Mover(self._fleet, self._reshaper, self._journal)
        self._policies = tuple(policies)
        self._phases: list[Phase] = []
        self._weights: PolicyWeights | None = None
        self._serving: asyncio.Task | None = None

    async def start(self) -> None:
        await self._fleet.start()

    async def shutdown(self) -> None:
        if self._serving:
            await cancel([self._serving])
        await self._fleet.shutdown()

    async def load_weights(self, weights: PolicyWeights) -> float:
        """Bring every engine to this policy version between phases, as `Fleet.sync_all` does."""
        assert not self._phases, "engines take the weights of a phase when they begin it"
        if self._serving:
            await self._serving
        self._weights = weights
        return await self._fleet.sync_all(weights)

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
        queues: dict[int, list[RolloutRequest]] = {lane.index: [] for lane in self._fleet.base}
        for index, request in assignments:
            assert index in queues, f"no phase begins on engine {index}"
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
        for lane in self._fleet.base:
            lane.waiting.append(phase)
        self._fleet.inbox.put_nowait((-1, Queued()))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return phase.done

    def timeline(self, start_s: float, end_s: float) -> Timeline:
        """What the engines did between two times of the event loop's clock; what was before is
        forgotten."""
        return self._journal.timeline(start_s, end_s)

    # Serving

    async def _serve(self) -> None:
        # Once more, for a phase that came while the last pumps ended.
        while self._phases:
            self._fleet.listen()
            try:
                await self._serve_phases()
            except Exception as error:
                self._fail(error)
            finally:
                await self._fleet.stop_listening()

    async def _serve_phases(self) -> None:
        while self._phases or not self._fleet.settled:
            index, news = await self._fleet.inbox.get()
            await self._handle(index, news)
            await self._reshaper.settle(self._fleet.changed)
            await self._end_phases()
            await self._enter_phases()

    async def _handle(self, index: int, news: News) -> None:
        self._fleet.changed.add(index)
        match news:
            case Queued():
                self._fleet.changed.update(self._lanes)
            case EngineEvents():
                await self._on_events(self._lanes[index], news)
                self._fleet.heard(index)
            case Refreshed():
                self._on_refreshed(self._lanes[index], news)
            case Synced():
                await self._on_synced(self._lanes[index], news)
            case Woken():
                await self._on_awake(self._lanes[index])
            case Restarted():
                self._on_restarted(self._lanes[index])
            case Fatal():
                raise news.error
            case EngineDied():
                await self._on_death(self._lanes[index], news)
            case Exception():
                raise news

    def _fail(self, error: Exception) -> None:
        if not self._phases:  # The next one does.
            self._fleet.inbox.put_nowait((-1, Fatal(error)))
        for phase in self._phases:
            if not phase.done.done():
                phase.done.set_exception(error)
        self._phases.clear()
        for lane in self._lanes.values():
            lane.waiting.clear()

    # From phase to phase

    async def _enter_phases(self) -> None:
        for lane in self._fleet.take_changed():
            while lane.free and lane.waiting:
                if lane.phase in self._phases:
                    await lane.count_drafting()
                lane.rest()
                lane.phase = lane.waiting.popleft()
                self._enter(lane, lane.phase)
                self._follow(lane, lane.phase)

    def _enter(self, lane: Lane, phase: Phase) -> None:
        """Take the phase's weights, and its requests once they are there."""
        lane.expect(phase.queues.pop(lane.index, ()))
        # One without requests may yet be given some, unless it has ended.
        if phase in self._phases:
            self._fleet.sync(lane, phase.weights, phase.label)

    def _follow(self, lane: Lane, phase: Phase) -> None:
        """Those that may come to its GPUs take the weights too, so that they are ready."""
        for mate in lane.mates:
            if mate.phase is not phase:
                mate.phase = phase
                self._refresh(mate)

    def _refresh(self, lane: Lane) -> None:
        if lane.alive and lane.phase in self._phases:
            self._fleet.refresh(lane, lane.phase.weights, lane.phase.label)

    def _on_refreshed(self, lane: Lane, synced: Synced) -> None:
        assert lane.phase is not None
        if synced.canary_error is not None:
            lane.phase.canary_errors.append(synced.canary_error)
            lane.phase.sync_s = max(lane.phase.sync_s, synced.sync_s)

    async def _on_synced(self, lane: Lane, synced: Synced) -> None:
        self._on_refreshed(lane, synced)
        await self._on_awake(lane)

    async def _on_awake(self, lane: Lane) -> None:
        """It begins, or first takes the weights that it lacks."""
        phase = lane.phase
        assert phase is not None
        if not lane.alive or lane.standby:
            return  # It died on the way, or its GPUs were taken over.
        if self._lacks_weights(lane, phase):
            self._fleet.sync(lane, phase.weights, phase.label)
            return
        lane.entering = False
        lane.rest()
        phase.began_s = min(phase.began_s, now_s())
        await lane.submit_all()

    def _lacks_weights(self, lane: Lane, phase: Phase) -> bool:
        """Those of a phase that it has done its part of are not missed: it goes to the next."""
        needed = phase in self._phases and (lane.unfinished or not lane.waiting)
        return bool(needed) and lane.version != phase.weights.policy_version

    async def _end_phases(self) -> None:
        while self._phases and self._phases[0].num_unfinished == 0:
            phase = self._phases[0]
            for lane in self._lanes.values():
                if lane.phase is phase and lane.takes_requests:
                    await lane.count_drafting()
            del self._phases[0]
            if not phase.done.done():
                phase.done.set_result(phase.outcome(now_s()))

    # Requests

    async def _on_events(self, lane: Lane, events: EngineEvents) -> None:
        phase = lane.phase
        if phase is None or (lane.entering and not lane.finishing):
            return
        finished: list[Rollout] = []
        for rollout in events.finished:
            if lane.forget(rollout.request.id):
                finished.append(rollout)
            else:
                phase.races.check(rollout)
        lane.hear(events)
        if finished:
            await self._on_finished(lane, phase, finished)
        if phase.watched and phase in self._phases:
            view = self._view(phase)
            if phase.on_progress:
                phase.on_progress(view)
            for policy in phase.policies:
                await self._mover.make(phase, self._after(phase), policy.decide(view))

    async def _on_finished(self, lane: Lane, phase: Phase, finished: list[Rollout]) -> None:
        lane.tally.num_rollouts += len(finished)
        lane.tally.num_tokens += sum(len(r.generated.token_ids) for r in finished)
        await all_of((phase.on_finished(finished), self._mover.end_races(phase, finished)))
        phase.num_finished += len(finished)

    def _view(self, phase: Phase) -> RolloutView:
        return RolloutView(
            elapsed_s=now_s() - min(phase.began_s, now_s()),
            engines=tuple(lane.view() for lane in self._fleet.at(phase)),
            num_finished=phase.num_finished,
            num_rollouts=phase.num_rollouts,
            num_deferrable=phase.num_deferrable if self._after(phase) else 0,
        )

    def _after(self, phase: Phase) -> Phase | None:
        """The next phase, if requests can be deferred to it."""
        at = self._phases.index(phase) + 1
        later = self._phases[at] if at < len(self._phases) else None
        return later if later and later.min_rollouts is not None else None

    # Deaths

    async def _on_death(self, lane: Lane, death: EngineDied) -> None:
        if not lane.alive:
            return  # Its pump and its weight sync met the same death.
        await self._fleet.bury(lane, death)
        if lane.phase in self._phases:
            lane.tally.num_restarts += 1
            self._drop_copies(lane, lane.phase)
            if not await self._reshaper.retreat(lane, lane.phase):
                await self._rescue(lane, lane.phase)

    def _drop_copies(self, lane: Lane, phase: Phase) -> None:
        """What is raced goes on where it is still."""
        for id in list(lane.unfinished):
            if self._fleet.holders(phase, id):
                phase.races.drop(id, lane.index)
                lane.forget(id)

    async def _rescue(self, lane: Lane, phase: Phase) -> None:
        """Spread its requests over the engines that are at the same phase or have yet to come to
        it; without one they wait for the restart, of another engine if its GPUs are not its own."""
        others = [o for o in self._lanes.values() if o.alive and o.may_serve(phase)]
        if not others and lane.standby:
            others = [mate for mate in lane.mates if mate.may_serve(phase)]
        if not others:
            return
        orphans = list(lane.unfinished.values())
        lane.unfinished, lane.seen = {}, None
        for i, other in enumerate(others):
            share = orphans[i :: len(others)]
            if other.index in phase.queues:
                phase.queues[other.index].extend(share)
            else:
                await other.give(share)

    def _on_restarted(self, lane: Lane) -> None:
        self._fleet.revive(lane)
        if lane.standby:
            self._refresh(lane)
        elif lane.phase in self._phases and not lane.parked:
            self._enter(lane, lane.phase)
