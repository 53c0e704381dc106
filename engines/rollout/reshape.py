"""Takes the GPUs of a pool from layout to layout, and its requests along (PAT, section 4.3).

                 Reshape                                  engines of the old layout   of the new one
    TP2 x 4  ──────────────►  TP4 x 2 ─► TP8              precopy                     expect_kv
                                                          take, stand by              expect
       ▲                         │        │               park ─────────────────────► wake
       └──── nothing left to do ─┴────────┘                                           weights
             or a death                                                               submit

Saving ahead and making it ready are orders to the engines (`Fleet`), which report to the inbox: all
go on and are heard meanwhile. When the last has reported, the switch is made if it still can be.
Then what is to the left of an arrow is over before a next event is read: a request is at one engine
at any time, in the new layout's from the moment it was withdrawn. The arrows are such orders too.
One that has finished before it could be withdrawn stays in its engine until the event comes.

A pool goes back to its base once none of its engines has anything left, and when an engine of a
higher TP degree dies. A dead engine is started again while its layout has the GPUs, or while the
pool has nothing to do and they are free: nowhere beside others at work.

The base is the layout in which stages begin: the lowest, until a policy has a stage begin in
another one. That one stays the base, so that steps which begin alike pay for no switch; nothing was
generated then, and nothing travels but what is queued.

Deviations from the paper (4.3): the engines of each layout stay and are parked, with their
communication groups and graphs, in place of one engine that is rebuilt; so weights are not
resharded at a switch but are there, or are loaded. Keys and values go through the node's memory.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engines.balance import in_turn, longest_first, places_after
from engines.bounded import all_of
from engines.rollout.fleet import Fleet
from engines.rollout.moves import Reshape
from engines.rollout.news import Copied
from engines.rollout.stage import GenerationStage
from engines.rollout.tracked_engine import TrackedEngine, now_s, num_response_tokens
from schemas.layout import Pool
from schemas.rollout import RequestId, RolloutRequest, SavedKV
from schemas.timeline import MoveKind

Taken = tuple[TrackedEngine, RolloutRequest]
"""A request with the engine that it was taken from."""


@dataclass(slots=True, eq=False)
class Precopy:
    """A switch that is made when what was saved ahead is there."""

    stage: GenerationStage
    move: Reshape
    left: set[int]
    """Engines that have yet to report."""
    saved: list[SavedKV] = field(default_factory=list)
    """Copies that have yet to be made ready."""


@dataclass(slots=True)
class PoolState:
    """The engines of a pool, and which of them work."""

    layouts: dict[int, list[TrackedEngine]]
    base: int
    """TP degree of the layout in which stages begin."""
    tp_degree: int
    """TP degree of the present layout."""
    under_way: tuple[GenerationStage, float] | None = None
    """The stage of a switch whose engines do not all have their GPUs yet, and since when they have
    been on the way, without saving keys and values."""
    precopy: Precopy | None = None
    """A switch that waits for its copies."""
    keep_kv: bool = True
    """Whether keys and values are kept, as its last move had it."""

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
        """Whether the pool has nothing left to do, and no event to wait for."""
        return not any(tracked.unfinished for own in self.layouts.values() for tracked in own)

    def may_become(self, tp_degree: int, stage: GenerationStage) -> bool:
        return (
            tp_degree in self.layouts
            and tp_degree != self.tp_degree
            and all(tracked.is_at(stage) and tracked.takes_requests for tracked in self.working)
            and all(tracked.alive for tracked in self.layouts[tp_degree])
        )

    def may_begin(self, tp_degree: int, stage: GenerationStage) -> bool:
        """Whether all of the pool is about to begin this stage, and could elsewhere."""
        return (
            tp_degree in self.layouts
            and tp_degree != self.base == self.tp_degree
            and self.done
            and all(own.alive and stage in list(own.waiting)[:1] for own in self.working)
            and all(tracked.alive for tracked in self.layouts[tp_degree])
        )

    def seats(self, tracked: TrackedEngine) -> list[TrackedEngine]:
        """Engines of the base that have, between them, what is meant for this one: prompts that
        were dealt in turn stay so, and samples of a prompt together."""
        own, base = self.layouts[tracked.engine.tp_degree], self.layouts[self.base]
        return [base[place] for place in places_after(own.index(tracked), len(own), len(base))]


class Reshaper:
    """Layouts of all pools, and what takes a pool from one to another."""

    def __init__(self, fleet: Fleet, pools: Sequence[Pool]) -> None:
        self._fleet = fleet
        self._states: dict[int, PoolState] = {}
        self._state_of: dict[int, PoolState] = {}
        for pool in pools:
            layouts = {tp: [fleet.engines[i] for i in own] for tp, own in pool.engines.items()}
            state = self._states[pool.index] = PoolState(layouts, pool.base, pool.base)
            self._state_of |= {i: state for own in pool.engines.values() for i in own}

    async def make(self, stage: GenerationStage, move: Reshape) -> None:
        """The move, if every engine that works is at this stage and in the middle of it. One that
        takes keys and values along is made when most of them are saved."""
        state = self._states.get(move.pool)
        if state is None or state.precopy or not state.may_become(move.tp_degree, stage):
            return
        if not move.move_kv:
            await self._make(state, stage, move)
            return
        state.precopy = Precopy(stage, move, {tracked.index for tracked in state.working})
        for tracked in state.working:
            self._fleet.precopy(tracked, _not_finishing(tracked), state.precopy)

    async def note_copied(self, tracked: TrackedEngine, copied: Copied) -> None:
        """Go on with a switch, if these were its last copies and it is still possible."""
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
                self._fleet.expect_kv(target, saved, precopy)
        elif not precopy.left:
            await self._make(state, stage, move)

    def drop_precopy(self, dead: TrackedEngine) -> None:
        """Give up a switch for which an engine has died."""
        if state := self._state_of.get(dead.index):
            state.precopy = None

    async def _make(self, state: PoolState, stage: GenerationStage, move: Reshape) -> None:
        """Take all requests, and give them to the other layout."""
        state.precopy, state.keep_kv = None, move.move_kv
        ordered_s = now_s()
        taken = await self._take(state)
        if taken:
            stage.num_switches += 1
            saved_s = await self._switch(state, move.tp_degree, stage, taken)
            state.under_way = stage, ordered_s + saved_s

    def note_woken(self, tracked: TrackedEngine) -> None:
        """Note that an engine has its GPUs, and if all have theirs, what the switch took."""
        state = self._state_of.get(tracked.index)
        if state is None or state.under_way is None:
            return
        stage, since_s = state.under_way
        woken_s = [tracked.woken_s for tracked in state.working]
        if min(woken_s) >= since_s:
            stage.control_s.append(max(woken_s) - since_s)
            state.under_way = None

    async def begin(self, stage: GenerationStage, move: Reshape) -> None:
        """Have this stage and those behind it begin in this layout, if the pool is idle."""
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

    def seats(self, index: int) -> list[TrackedEngine]:
        """Engines on which a stage begins what is planned for this one."""
        assert index in self._fleet.engines, f"no stage begins on engine {index}"
        tracked, state = self._fleet.engines[index], self._state_of.get(index)
        return state.seats(tracked) if state else [tracked]

    async def settle(self) -> None:
        """Take the pools that have nothing left to do back to the base, by way of starting what is
        dead of the other layouts."""
        for state in self._states.values():
            if state.done and (state.raised or self._may_mend(state)):
                await self._switch(state, state.base, None, [])

    def _may_mend(self, state: PoolState) -> bool:
        """Whether engines on standby are to be started and those at work can leave."""
        there = all(tracked.takes_requests or tracked.gone for tracked in state.working)
        return there and any(map(self._fleet.waits, state.standing_by))

    async def retreat(self, dead: TrackedEngine, stage: GenerationStage) -> bool:
        """Take a pool back to the base with all requests if a working engine of another layout
        died; whether it did."""
        state = self._state_of.get(dead.index)
        if state is None or not state.raised or dead.standby:
            return False
        await self._switch(state, state.base, stage, await self._take(state))
        return True

    async def _take(self, state: PoolState) -> list[Taken]:
        """All that is unfinished in the present layout, from all its engines at once."""
        taken = await all_of(self._take_from(tracked, state.keep_kv) for tracked in state.working)
        return [own for of_engine in taken for own in of_engine]

    async def _take_from(self, tracked: TrackedEngine, keep_kv: bool) -> list[Taken]:
        ids = _not_finishing(tracked)
        taken = await tracked.take(ids, keep_kv=keep_kv) if ids else []
        return [(tracked, request) for request in taken]

    async def _switch(
        self,
        state: PoolState,
        tp_degree: int,
        stage: GenerationStage | None,
        taken: Sequence[Taken],
    ) -> float:
        """Park the present layout and wake another. `stage`: of the requests that go along.

        Returns the seconds for which keys and values were saved.
        """
        state.under_way = state.precopy = None
        at_work = [tracked for tracked in state.working if tracked.takes_requests and tracked.stage]
        saved_s = await all_of(tracked.count() for tracked in at_work)
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
        """Give requests to engines that are alive, or else to those that will be again."""
        targets = [tracked for tracked in state.working if tracked.alive] or state.working
        shares = longest_first(taken, _context_tokens, len(targets))
        for target, share in zip(targets, shares, strict=True):
            target.expect(request for _, request in share)
            for origin, request in share:
                stage.races.move(request.id, origin.index, target.index)
                self._fleet.chronicle.note(MoveKind.RESHAPED, request, origin, target)


def _not_finishing(tracked: TrackedEngine) -> list[RequestId]:
    return [id for id in tracked.unfinished if id not in tracked.finishing]


def _merge(state: PoolState, stage: GenerationStage, taken: Sequence[Taken]) -> list[Taken]:
    """Requests without doubles: of the copies of a raced request that meet in a pool, the one with
    the most tokens; none when one of them has finished."""
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
    return len(request.prompt_token_ids) + num_response_tokens(request)
