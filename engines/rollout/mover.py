"""The mover makes the moves that policies decide on, if they are still possible.

    Start      the stage's queue ─► give ─ target
    Migrate    origin ─ take ─► give ─ target
    Defer      origin ─ take ─► the next stage
    Race       origin ─ copy ─► give ─ target; the first to finish ─► take from the others
               (with keys and values, if both are on one node)
    Concede    take from an engine; the copies elsewhere go on
    Redraft    the engine changes its drafting setting
    Reshape    move all of a pool's requests to other engines on the same GPUs (`reshape.py`)

A request is on one engine, or on several of one stage while it is raced. The coordinator handles
moves and events one after the other. Before it reads the next event, the losing copies of a race
are withdrawn. A loser that finished all the same does not count, so each request finishes once.
If an engine dies during a move, its requests stay in its record, and the `Reassigner` moves them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from engines.bounded import gather_all
from engines.rollout.fleet import Fleet
from engines.rollout.interface import Finished
from engines.rollout.moves import (
    Close,
    Concede,
    Defer,
    Migrate,
    Move,
    Race,
    Redraft,
    Reshape,
    Start,
)
from engines.rollout.reshape import Reshaper
from engines.rollout.stage import GenerationStage
from engines.rollout.tracked_engine import TrackedEngine, num_response_tokens
from schemas.rollout import DraftSetting, RequestId, RolloutRequest
from schemas.timeline import MoveKind


class Mover:
    """Maker of moves of requests between the engines of a fleet."""

    def __init__(self, fleet: Fleet, reshaper: Reshaper) -> None:
        self._fleet = fleet
        self._reshaper = reshaper

    async def make(
        self, stage: GenerationStage, later: GenerationStage | None, moves: Sequence[Move]
    ) -> None:
        """Make moves, and skip those that are no longer possible. `later`: the next stage, if it
        is queued."""
        await self._redraft(stage, [move for move in moves if isinstance(move, Redraft)])
        for kind, some in groupby(moves, type):
            if kind is Start:
                await self._start(stage, [move for move in some if isinstance(move, Start)])
                continue
            if kind is Race:
                await self._race(stage, [move for move in some if isinstance(move, Race)])
                continue
            for move in some:
                await self._make_one(stage, later, move)

    async def _make_one(
        self, stage: GenerationStage, later: GenerationStage | None, move: Move
    ) -> None:
        match move:
            case Reshape():
                await self._reshaper.make(stage, move)
            case Migrate() | Defer():
                await self._transfer(stage, later, move)
            case Close() if later and later.takes_deferred:
                await self._close(stage, later)
            case Concede():
                await self._concede(stage, move)

    async def occupy(self, stage: GenerationStage) -> None:
        """Start a waiting request on each engine of the stage that has none, so that the stage
        ends whatever its policies decide."""
        empty = (tracked for tracked in self._fleet.at(stage) if not tracked.unfinished)
        pairs = zip(list(stage.waiting), empty, strict=False)
        await self._start(stage, [Start(id, tracked.index) for id, tracked in pairs])

    async def end_races(self, stage: GenerationStage, finished: Sequence[Finished]) -> None:
        """Withdraw the losing copies of these rollouts, from all engines in parallel."""
        lost: dict[int, list[RequestId]] = defaultdict(list)
        for rollout in finished:
            if stage.races.win(rollout):
                for tracked in self._fleet.holders(stage, rollout.id):
                    lost[tracked.index].append(rollout.id)
        await gather_all(
            self._withdraw(stage, self._fleet.engines[i], ids) for i, ids in lost.items()
        )

    async def _concede(self, stage: GenerationStage, move: Concede) -> None:
        """Withdraw a copy if another copy goes on elsewhere."""
        tracked = self._fleet.engines[move.engine]
        holders = self._fleet.holders(stage, move.id)
        others = [one for one in holders if one is not tracked and one.is_at(stage)]
        if tracked in holders and others and stage.races.has(move.id, tracked.index):
            # `_take` leaves out a copy that has finished meanwhile: that copy wins.
            for request in await self._take(tracked, [move.id]):
                num_tokens = num_response_tokens(request)
                stage.races.concede(move.id, tracked.index, num_tokens)

    async def _withdraw(
        self, stage: GenerationStage, tracked: TrackedEngine, ids: Sequence[RequestId]
    ) -> None:
        """Withdraw losing copies. For finished or dead copies, use the last reported token
        count."""
        num_tokens = {id: tracked.num_tokens(id) for id in ids}
        num_tokens |= {r.id: num_response_tokens(r) for r in await self._take(tracked, ids)}
        for id in ids:
            tracked.forget(id)
            stage.races.lose(id, tracked.index, num_tokens[id])

    async def _redraft(self, stage: GenerationStage, moves: Sequence[Redraft]) -> None:
        """Change drafting settings with one call to each engine, because a call may wait for the
        end of a decoding step."""
        settings: dict[int, dict[RequestId, DraftSetting]] = defaultdict(dict)
        for move in moves:
            tracked = self._fleet.engines[move.engine]
            if tracked.is_at(stage) and move.id in tracked.unfinished:
                settings[move.engine][move.id] = move.drafting
        await gather_all(self._fleet.engines[i].redraft(own) for i, own in settings.items())

    async def _start(self, stage: GenerationStage, moves: Sequence[Start]) -> None:
        """Start waiting requests, with one call to each engine, which then prefills them
        together."""
        started: dict[int, list[RolloutRequest]] = defaultdict(list)
        for move in moves:
            there = self._fleet.engines[move.to_engine].is_at(stage)
            if there and (request := stage.waiting.pop(move.id, None)):
                started[move.to_engine].append(request)
        await gather_all(self._fleet.engines[i].add(own) for i, own in started.items())

    async def _transfer(
        self, stage: GenerationStage, later: GenerationStage | None, move: Migrate | Defer
    ) -> None:
        holders = self._fleet.holders(stage, move.id)
        if len(holders) != 1 or not holders[0].is_at(stage):
            return  # The request has finished, is raced, or its engine cannot give it away.
        (origin,), target = holders, self._fleet.engines[move.to_engine]
        match move:
            case Migrate() if target.is_at(stage) and target is not origin:
                await self._migrate(stage, origin, target, move.id)
            case Defer() if later and later.takes_deferred and stage.num_deferrable:
                await self._defer(stage, later, origin, target, move.id)

    async def _race(self, stage: GenerationStage, moves: Sequence[Race]) -> None:
        """Start races, with one call to each origin for all its copies, because an engine pauses
        while it saves keys and values."""
        first: dict[tuple[RequestId, int], Race] = {}
        for move in moves:
            first.setdefault((move.id, move.to_engine), move)
        by_origin: dict[tuple[int, bool], list[Race]] = defaultdict(list)
        for move in first.values():
            target = self._fleet.engines[move.to_engine]
            holders = self._fleet.holders(stage, move.id)
            working = [tracked for tracked in holders if tracked.is_at(stage)]
            if working and target.is_at(stage) and target not in holders:
                origin = max(working, key=lambda tracked: tracked.num_tokens(move.id))
                by_origin[origin.index, origin.shares_memory_with(target)].append(move)
        for (index, keep_kv), races in by_origin.items():
            origin = self._fleet.engines[index]
            ids = list(dict.fromkeys(move.id for move in races))
            copies = {copy.id: copy for copy in await origin.copy(ids, keep_kv=keep_kv)}
            for move in races:
                if copy := copies.get(move.id):
                    await self._begin_race(stage, origin, copy, move)

    async def _begin_race(
        self, stage: GenerationStage, origin: TrackedEngine, copy: RolloutRequest, move: Race
    ) -> None:
        target = self._fleet.engines[move.to_engine]
        num_tokens, with_kv = num_response_tokens(copy), copy.kv is not None
        stage.races.begin(copy.id, origin.index, target.index, num_tokens, with_kv=with_kv)
        self._fleet.timeline_log.note(MoveKind.RACED, copy, origin, target)
        await target.add([replace(copy, drafting=move.drafting)])

    async def _migrate(
        self, stage: GenerationStage, origin: TrackedEngine, target: TrackedEngine, id: RequestId
    ) -> None:
        for request in await self._take(origin, [id]):
            stage.num_migrated += 1
            self._fleet.timeline_log.note(MoveKind.MIGRATED, request, origin, target)
            await target.add([request])

    async def _defer(
        self,
        stage: GenerationStage,
        later: GenerationStage,
        origin: TrackedEngine,
        target: TrackedEngine,
        id: RequestId,
    ) -> None:
        if origin.unfinished[id].deferred_from is not None:
            return  # A request is deferred at most once.
        # The target may have finished its part of the later stage, or be on standby. Then use the
        # origin or an engine on its GPUs: one of them still has to begin the later stage, unless
        # the origin came back to this stage in place of an engine that is gone.
        welcome = [own for own in (target, origin, *origin.gpu_sharers) if own.may_serve(later)]
        if not welcome:
            return
        await self._defer_all(stage, later, origin, welcome[0], [id])

    async def _close(self, stage: GenerationStage, later: GenerationStage) -> None:
        for tracked in self._fleet.engines.values():
            if not (tracked.alive and tracked.may_serve(later)):
                continue
            # An engine ahead may have many requests, but few of this stage.
            held = tracked.unfinished if tracked.stage is stage else tracked.earlier
            ids = [
                id
                for id in held
                if tracked.stage_of(id) is stage
                and (request := tracked.unfinished.get(id))
                and id not in tracked.finishing
                and request.deferred_from is None
                and not stage.races.has(id, tracked.index)
            ]
            if ids:
                await self._defer_all(stage, later, tracked, tracked, ids[: stage.num_deferrable])

    async def _defer_all(
        self,
        stage: GenerationStage,
        later: GenerationStage,
        origin: TrackedEngine,
        target: TrackedEngine,
        ids: Sequence[RequestId],
    ) -> None:
        taken = await self._take(origin, ids)
        for request in taken:
            self._fleet.timeline_log.note(MoveKind.DEFERRED, request, origin, target)
        deferred = [stage.defer_to(later, request) for request in taken]
        if target.index in later.queues:
            # Deferred requests are the longest, so they go first.
            later.queues[target.index][:0] = deferred
        else:
            await target.add(deferred, None if target.stage is later else later)

    async def _take(self, tracked: TrackedEngine, ids: Sequence[RequestId]) -> list[RolloutRequest]:
        self._fleet.changed.add(tracked.index)
        return await tracked.take(ids)
