"""Switch the GPUs of a pool between layouts, and move its requests along (PAT, section 4.3).

                 Reshape                                  engines of the old layout   of the new one
    TP2 x 4  ──────────────►  TP4 x 2 ─► TP8              precopy                     expect_kv
                                                          take, stand by              expect
       ▲                         │        │               park ─────────────────────► wake
       └──── no requests left ───┴────────┘                                           weights
             or a death                                                               submit

`precopy` and `expect_kv` are orders to the engines (`Fleet`) that report to the inbox, so
generation continues meanwhile. After the last report the pool switches, if it still can. It takes
the requests, updates the records and issues the orders before the coordinator reads another event.
So a withdrawn request belongs to the new layout at once, and never to two engines. The `park` and
`wake` orders run after that. A request that finished before it could be withdrawn stays with its
engine until the event arrives.

A pool returns to its base layout when it has no requests left, or when an engine of another layout
dies. A dead engine restarts while its layout has the GPUs, or while the pool is idle and the GPUs
are free. It never restarts beside engines at work on the same GPUs.

Stages begin in the base layout. This is the lowest TP degree until a policy begins a stage in
another layout, which then becomes the base. So later stages that begin in the same layout need no
switch. A change of base happens before anything is generated and moves only queued requests.

Deviations from the paper (4.3): the engines of each layout stay parked with their communication
groups and graphs, instead of one engine that is rebuilt. So a switch does not reshard weights: a
parked engine keeps its weights or loads them. Keys and values go through the node's memory.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle

from refrain.engines.balance import in_turn, longest_first, places_after
from refrain.engines.bounded import gather_all
from refrain.engines.rollout import orders
from refrain.engines.rollout.engine_reports import Copied
from refrain.engines.rollout.fleet import Fleet
from refrain.engines.rollout.moves import Reshape
from refrain.engines.rollout.stage import GenerationStage
from refrain.engines.rollout.tracked_engine import TrackedEngine, now_s, num_response_tokens
from refrain.schemas.layout import Pool
from refrain.schemas.rollout import RequestId, RolloutRequest, SavedKV
from refrain.schemas.timeline import MoveKind

Taken = tuple[TrackedEngine, RolloutRequest]
"""A request and the engine that had it."""


@dataclass(slots=True, eq=False)
class Precopy:
    """A switch that waits until keys and values are saved ahead."""

    stage: GenerationStage
    move: Reshape
    left: set[int]
    """Engines whose report is still to come."""
    saved: list[SavedKV] = field(default_factory=list)
    """Saved copies that the new layout has not prepared for yet."""


@dataclass(slots=True)
class PoolState:
    """Engines of a pool, by layout, and the layout that has the GPUs."""

    layouts: dict[int, list[TrackedEngine]]
    base: int
    """TP degree of the layout in which stages begin."""
    tp_degree: int
    """TP degree of the current layout."""
    under_way: tuple[GenerationStage, float] | None = None
    """Stage and start time of a switch whose engines do not all have their GPUs yet. The start
    time excludes saving keys and values."""
    precopy: Precopy | None = None
    """Switch that waits for saved copies."""
    keep_kv: bool = True
    """Whether the last move kept keys and values."""

    @property
    def working(self) -> list[TrackedEngine]:
        return self.layouts[self.tp_degree]

    @property
    def standing_by(self) -> list[TrackedEngine]:
        """Engines of the other layouts."""
        others = (own for tp, own in self.layouts.items() if tp != self.tp_degree)
        return [tracked for own in others for tracked in own]

    @property
    def raised(self) -> bool:
        return self.tp_degree != self.base

    @property
    def done(self) -> bool:
        """Whether no engine of the pool has an unfinished request."""
        return not any(tracked.unfinished for own in self.layouts.values() for tracked in own)

    def may_become(self, tp_degree: int, stage: GenerationStage) -> bool:
        return (
            tp_degree in self.layouts
            and tp_degree != self.tp_degree
            and all(tracked.is_at(stage) and tracked.takes_requests for tracked in self.working)
            and all(tracked.alive for tracked in self.layouts[tp_degree])
        )

    def may_begin(self, tp_degree: int, stage: GenerationStage) -> bool:
        """Whether the whole pool is about to begin this stage and could use the other layout."""
        return (
            tp_degree in self.layouts
            and tp_degree != self.base == self.tp_degree
            and self.done
            and all(own.alive and stage in list(own.waiting)[:1] for own in self.working)
            and all(tracked.alive for tracked in self.layouts[tp_degree])
        )

    def seats(self, tracked: TrackedEngine) -> list[TrackedEngine]:
        """Return the base engines that share the requests assigned to this engine. Prompts dealt
        in turn stay so, and samples of one prompt stay together."""
        own, base = self.layouts[tracked.engine.tp_degree], self.layouts[self.base]
        return [base[place] for place in places_after(own.index(tracked), len(own), len(base))]


class Reshaper:
    """Owner of all pools' layouts: switches a pool from one layout to another."""

    def __init__(self, fleet: Fleet, pools: Sequence[Pool]) -> None:
        self._fleet = fleet
        self._states: dict[int, PoolState] = {}
        self._state_of: dict[int, PoolState] = {}
        for pool in pools:
            layouts = {tp: [fleet.engines[i] for i in own] for tp, own in pool.engines.items()}
            state = self._states[pool.index] = PoolState(layouts, pool.base, pool.base)
            self._state_of |= {i: state for own in pool.engines.values() for i in own}

    async def make(self, stage: GenerationStage, move: Reshape) -> None:
        """Make the move, if every working engine serves this stage. A move with keys and values
        begins by saving them ahead; the switch follows once most are saved."""
        state = self._states.get(move.pool)
        if state is None or state.precopy or not state.may_become(move.tp_degree, stage):
            return
        if not move.move_kv:
            await self._make(state, stage, move)
            return
        state.precopy = Precopy(stage, move, {tracked.index for tracked in state.working})
        for tracked in state.working:
            ids = [request.id for request in tracked.pending]
            self._fleet.order(orders.precopy, tracked, ids, state.precopy)

    async def note_copied(self, tracked: TrackedEngine, copied: Copied) -> None:
        """Continue a switch after the last report of its phase, if it is still possible."""
        state = self._state_of[tracked.index]
        precopy = state.precopy
        if precopy is None or precopy is not copied.of:
            return
        precopy.left.discard(tracked.index)
        precopy.saved += [copied.saved] if copied.saved else []
        stage, move = precopy.stage, precopy.move
        if not state.may_become(move.tp_degree, stage):
            state.precopy = None
        elif not precopy.left and precopy.saved:
            targets = state.layouts[move.tp_degree]
            saved, precopy.saved = precopy.saved, []
            precopy.left = {target.index for target in targets}
            for target in targets:
                self._fleet.order(orders.expect_kv, target, saved, precopy)
        elif not precopy.left:
            await self._make(state, stage, move)

    def drop_precopy(self, dead: TrackedEngine) -> None:
        """Cancel a pending switch of the dead engine's pool."""
        if state := self._state_of.get(dead.index):
            state.precopy = None

    async def _make(self, state: PoolState, stage: GenerationStage, move: Reshape) -> None:
        """Move all requests to the other layout."""
        state.precopy, state.keep_kv = None, move.move_kv
        ordered_s = now_s()
        taken = await self._take(state)
        if taken:
            stage.num_switches += 1
            saved_s = await self._switch(state, move.tp_degree, stage, taken)
            state.under_way = stage, ordered_s + saved_s

    def note_woken(self, tracked: TrackedEngine) -> None:
        """Note that an engine has its GPUs. After the last engine, record the switch's duration."""
        state = self._state_of.get(tracked.index)
        if state is None or state.under_way is None:
            return
        stage, since_s = state.under_way
        woken_s = [tracked.woken_s for tracked in state.working]
        if min(woken_s) >= since_s:
            stage.control_s.append(max(woken_s) - since_s)
            state.under_way = None

    async def begin(self, stage: GenerationStage, move: Reshape) -> None:
        """Begin this stage and the queued ones in this layout, if the pool is idle."""
        state = self._states.get(move.pool)
        if state is None or not state.may_begin(move.tp_degree, stage):
            return
        before, state.base = state.working, move.tp_degree
        after = state.layouts[state.base]
        for waiting in before[0].waiting:
            queues = [(tracked, waiting.queues.pop(tracked.index)) for tracked in before]
            waiting.queues |= {tracked.index: [] for tracked in after}
            for tracked, requests in queues:
                seat_of = in_turn(state.seats(tracked))
                for request in requests:
                    waiting.queues[seat_of(request.id.prompt_key).index].append(request)
        for tracked in after:
            tracked.waiting = deque(before[0].waiting)
        for tracked in before:
            tracked.waiting.clear()
        others = [tracked for tracked in self._fleet.base if tracked not in before]
        self._fleet.base = sorted([*others, *after], key=lambda tracked: tracked.index)
        await self._switch(state, state.base, None, [])

    def queues(
        self, placed: Sequence[tuple[int, RolloutRequest]], begin: Sequence[TrackedEngine]
    ) -> dict[int, list[RolloutRequest]]:
        """Return the requests with which each engine begins a stage."""
        queues: dict[int, list[RolloutRequest]] = {tracked.index: [] for tracked in begin}
        others = cycle(list(queues))
        seats = {index: in_turn(self.seats(index)) for index, _ in placed}
        for index, request in placed:
            seat = seats[index](request.id.prompt_key)
            queues[next(others) if seat.gone else seat.index].append(request)
        return queues

    def seats(self, index: int) -> list[TrackedEngine]:
        """Return the base engines that begin the requests assigned to this engine."""
        assert index in self._fleet.engines, f"no stage begins on engine {index}"
        tracked, state = self._fleet.engines[index], self._state_of.get(index)
        return state.seats(tracked) if state else [tracked]

    async def settle(self) -> None:
        """Return idle pools to the base layout. Restart dead engines of other layouts first."""
        for state in self._states.values():
            if state.done and (state.raised or self._may_restart(state)):
                await self._switch(state, state.base, None, [])

    def _may_restart(self, state: PoolState) -> bool:
        """Whether a dead engine on standby needs a restart and the working engines can park."""
        there = all(tracked.takes_requests or tracked.gone for tracked in state.working)
        return there and any(map(self._fleet.needs_restart, state.standing_by))

    async def retreat(self, dead: TrackedEngine, stage: GenerationStage) -> bool:
        """Return the pool and all its requests to the base layout, if the dead engine worked in
        another layout. Return whether the pool switched."""
        state = self._state_of.get(dead.index)
        if state is None or not state.raised or dead.standby:
            return False
        await self._switch(state, state.base, stage, await self._take(state))
        return True

    async def _take(self, state: PoolState) -> list[Taken]:
        """Withdraw all unfinished requests from the engines of the current layout, in parallel."""
        taken = await gather_all(
            self._take_from(tracked, state.keep_kv) for tracked in state.working
        )
        return [own for of_engine in taken for own in of_engine]

    async def _take_from(self, tracked: TrackedEngine, keep_kv: bool) -> list[Taken]:
        ids = [request.id for request in tracked.pending]
        taken = await tracked.take(ids, keep_kv=keep_kv) if ids else []
        return [(tracked, request) for request in taken]

    async def _switch(
        self,
        state: PoolState,
        tp_degree: int,
        stage: GenerationStage | None,
        taken: Sequence[Taken],
    ) -> float:
        """Park the current layout and wake another. `stage`: stage of the taken requests.

        Returns the longest time in seconds that an engine spent on saving keys and values.
        """
        state.under_way = state.precopy = None
        at_work = [tracked for tracked in state.working if tracked.takes_requests and tracked.stage]
        saved_s = await gather_all(tracked.count() for tracked in at_work)
        for tracked in state.working:
            tracked.stand_by()
            if tracked.alive:
                self._fleet.park(tracked)
        state.tp_degree = tp_degree
        if state.done:
            for tracked in state.standing_by:
                self._fleet.restart(tracked)
        for tracked in state.working:
            tracked.leave_standby()
            if stage:
                tracked.stage = stage
            if tracked.alive:
                self._fleet.wake(tracked)
            else:
                self._fleet.restart(tracked)
        if stage:
            self._give(state, stage, _merge(state, stage, taken))
        return max(saved_s, default=0.0)

    def _give(self, state: PoolState, stage: GenerationStage, taken: Sequence[Taken]) -> None:
        """Give requests to live engines of the new layout. If none is alive, give them to the dead
        ones, which will restart."""
        targets = [tracked for tracked in state.working if tracked.alive] or state.working
        shares = longest_first(taken, _context_tokens, len(targets))
        for target, share in zip(targets, shares, strict=True):
            target.expect(request for _, request in share)
            for origin, request in share:
                stage.races.move(request.id, origin.index, target.index)
                self._fleet.timeline_log.note(MoveKind.RESHAPED, request, origin, target)


def _merge(state: PoolState, stage: GenerationStage, taken: Sequence[Taken]) -> list[Taken]:
    """Keep one copy of each raced request that meets its copies in the pool: the one with the most
    tokens, or none if a copy has finished."""
    finishing = {
        id for own in state.layouts.values() for tracked in own for id in tracked.finishing
    }
    kept: dict[RequestId, Taken] = {}
    for tracked, request in sorted(taken, key=lambda own: -num_response_tokens(own[1])):
        if request.id in kept or request.id in finishing:
            stage.races.leave(request.id, tracked.index, num_response_tokens(request))
        else:
            kept[request.id] = tracked, request
    return list(kept.values())


def _context_tokens(taken: Taken) -> int:
    _, request = taken
    generated = request.generated
    return len(request.prompt_token_ids) + (len(generated.token_ids) if generated else 0)
