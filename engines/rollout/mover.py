"""Makes the moves that policies decide on, as far as they are still possible.

    Migrate    origin ─ take ─► give ─ target
    Defer      origin ─ take ─► the next phase
    Race       origin ─ copy ─► give ─ target; the first to finish ─► take from the others
    Redraft    the engine drafts differently
    Reshape    all of a pool's to other engines on the same GPUs (`reshape.py`)

A request is in one lane, or in several of one phase while it is raced. Moves and events are handled
one after the other: when the next event is read, the lanes of the losers have forgotten their
copies, and one that has finished all the same does not count. So each request finishes once. An
engine that dies in the middle of a move leaves its requests in its lane, from where they are
rescued.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from engines.rollout.fleet import Fleet, all_of
from engines.rollout.moves import Defer, Migrate, Move, Race, Redraft, Reshape
from engines.rollout.recorder import Journal
from engines.rollout.reshape import Reshaper
from engines.rollout.stage import Phase
from engines.rollout.tracked_engine import Lane, num_response_tokens
from schemas.rollout import DraftSetting, RequestId, Rollout, RolloutRequest
from schemas.timeline import MoveKind


class Mover:
    """Moves requests between the lanes of a fleet, and keeps record of it."""

    def __init__(self, fleet: Fleet, reshaper: Reshaper, journal: Journal) -> None:
        self._fleet = fleet
        self._reshaper = reshaper
        self._journal = journal

    async def make(self, phase: Phase, later: Phase | None, moves: Sequence[Move]) -> None:
        """`later`: the phase to which requests may be deferred; None: to none."""
        await self._redraft(phase, [move for move in moves if isinstance(move, Redraft)])
        for move in moves:
            match move:
                case Reshape():
                    await self._reshaper.make(phase, move)
                case Migrate() | Defer() | Race():
                    await self._transfer(phase, later, move)

    async def end_races(self, phase: Phase, finished: Sequence[Rollout]) -> None:
        """Withdraw the copies that have lost to these, from all engines at once."""
        lost: dict[int, list[RequestId]] = defaultdict(list)
        for rollout in finished:
            if phase.races.win(rollout):
                for lane in self._fleet.holders(phase, rollout.request.id):
                    lost[lane.index].append(rollout.request.id)
        await all_of(self._withdraw(phase, self._fleet.lanes[i], ids) for i, ids in lost.items())

    async def _withdraw(self, phase: Phase, lane: Lane, ids: Sequence[RequestId]) -> None:
        """Of one that has finished too, or died, the tokens that it had are those last told."""
        num_tokens = {id: lane.num_tokens(id) for id in ids}
        num_tokens |= {r.id: num_response_tokens(r) for r in await self._take(lane, ids)}
        for id in ids:
            lane.forget(id)
            phase.races.lose(id, lane.index, num_tokens[id])

    async def _redraft(self, phase: Phase, moves: Sequence[Redraft]) -> None:
        """One call to each engine: a call may wait for the end of a decoding step."""
        settings: dict[int, dict[RequestId, DraftSetting]] = defaultdict(dict)
        for move in moves:
            lane = self._fleet.lanes[move.engine]
            if lane.is_at(phase) and move.id in lane.unfinished:
                settings[move.engine][move.id] = move.drafting
        await all_of(self._fleet.lanes[i].redraft(own) for i, own in settings.items())

    async def _transfer(
        self, phase: Phase, later: Phase | None, move: Migrate | Defer | Race
    ) -> None:
        holders = self._fleet.holders(phase, move.id)
        working = [lane for lane in holders if not lane.standby]
        if not working:
            return
        origin = max(working, key=lambda lane: lane.num_tokens(move.id))
        target, raced = self._fleet.lanes[move.to_engine], len(holders) > 1
        welcome = target.is_at(phase) and target not in holders
        match move:
            case Race() if welcome:
                await self._race(phase, origin, target, move)
            case Migrate() if welcome and not raced:
                await self._migrate(phase, origin, target, move.id)
            case Defer() if later and phase.num_deferrable and not raced:
                await self._defer(phase, later, origin, target, move.id)

    async def _race(self, phase: Phase, origin: Lane, target: Lane, move: Race) -> None:
        for request in await origin.copy(move.id):
            num_tokens = num_response_tokens(request)
            phase.races.begin(request.id, origin.index, target.index, num_tokens)
            self._journal.note(MoveKind.RACED, request, origin, target)
            await target.give([replace(request, drafting=move.drafting)])

    async def _migrate(self, phase: Phase, origin: Lane, target: Lane, id: RequestId) -> None:
        for request in await self._take(origin, [id]):
            phase.num_migrated += 1
            self._journal.note(MoveKind.MIGRATED, request, origin, target)
            await target.give([request])

    async def _defer(
        self, phase: Phase, later: Phase, origin: Lane, target: Lane, id: RequestId
    ) -> None:
        if origin.unfinished[id].deferred_from is not None:
            return  # Not twice.
        for request in await self._take(origin, [id]):
            deferred = phase.leave_to(later, request)
            # The target may have done its part of the later phase, or be on standby. The origin
            # has yet to begin it, or those that had its GPUs when this phase began.
            lanes = (target, origin, *origin.mates)
            target = next(lane for lane in lanes if lane.may_serve(later))
            self._journal.note(MoveKind.DEFERRED, request, origin, target)
            if target.index in later.queues:
                later.queues[target.index].append(deferred)
            else:
                await target.give([deferred])

    async def _take(self, lane: Lane, ids: Sequence[RequestId]) -> list[RolloutRequest]:
        self._fleet.changed.add(lane.index)
        return await lane.take(ids)
