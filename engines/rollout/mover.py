"""Make the moves that policies decide on, if they are still possible.

    Start      the stage's queue ─► give ─ target
    Migrate    (origin ─ save keys and values ahead ─►) origin ─ take ─► give ─ target
    Defer      origin ─ take ─► the next stage
    Race       origin ─ copy ─► give ─ target; the first to finish ─► take from the others
    Concede    take from an engine; the copies elsewhere go on
    Redraft    the engine changes its drafting setting
    Reshape    move all of a pool's requests to other engines on the same GPUs (`reshape.py`)

A request is on one engine, or on several of one stage while it is raced. The coordinator handles
moves and events one after the other. Before it reads the next event, the losing copies of a race
are withdrawn. A loser that finished all the same does not count, so each request finishes once.
If an engine dies during a move, its requests stay in its record, and `reassign.py` moves them.

An engine takes a second and more to copy a request or to save its keys and values. These are orders
(`preparations.py`), so the coordinator reads other events meanwhile. When the report arrives, the
move is made if it is still possible. Another order then gives the copy to its engine.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from refrain.engines.bounded import gather_all
from refrain.engines.rollout import orders
from refrain.engines.rollout.fleet import Fleet
from refrain.engines.rollout.interface import Finished
from refrain.engines.rollout.moves import (
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
from refrain.engines.rollout.preparations import Preparation
from refrain.engines.rollout.reshape import Reshaper
from refrain.engines.rollout.stage import GenerationStage
from refrain.engines.rollout.tracked_engine import TrackedEngine, num_response_tokens
from refrain.schemas.rollout import DraftSetting, RequestId, RolloutRequest
from refrain.schemas.timeline import MoveKind


async def make(
    fleet: Fleet,
    reshaper: Reshaper,
    stage: GenerationStage,
    later: GenerationStage | None,
    moves: Sequence[Move],
) -> None:
    """Make moves, and skip those that are no longer possible. `later`: the next stage, if it
    is queued."""
    await _redraft(fleet, stage, [move for move in moves if isinstance(move, Redraft)])
    for kind, some in groupby(moves, type):
        if kind is Start:
            await _start(fleet, stage, [move for move in some if isinstance(move, Start)])
            continue
        if kind is Race:
            await _race(fleet, stage, [move for move in some if isinstance(move, Race)])
            continue
        for move in some:
            await _make_one(fleet, reshaper, stage, later, move)


async def _make_one(
    fleet: Fleet,
    reshaper: Reshaper,
    stage: GenerationStage,
    later: GenerationStage | None,
    move: Move,
) -> None:
    match move:
        case Reshape():
            await reshaper.make(stage, move)
        case Migrate() | Defer():
            await _transfer(fleet, stage, later, move)
        case Close() if later and later.takes_deferred:
            await _close(fleet, stage, later)
        case Concede():
            await _concede(fleet, stage, move)


async def occupy(fleet: Fleet, stage: GenerationStage) -> None:
    """Start a waiting request on each engine of the stage that has none, so that the stage
    ends whatever its policies decide."""
    empty = (tracked for tracked in fleet.at(stage) if not tracked.unfinished)
    pairs = zip(list(stage.waiting), empty, strict=False)
    await _start(fleet, stage, [Start(id, tracked.index) for id, tracked in pairs])


async def end_races(fleet: Fleet, stage: GenerationStage, finished: Sequence[Finished]) -> None:
    """Withdraw the losing copies of these rollouts, from all engines in parallel."""
    lost: dict[int, list[RequestId]] = defaultdict(list)
    for rollout in finished:
        if stage.races.win(rollout):
            for tracked in fleet.holders(stage, rollout.id):
                lost[tracked.index].append(rollout.id)
    await gather_all(_withdraw(fleet, stage, fleet.engines[i], ids) for i, ids in lost.items())


async def _concede(fleet: Fleet, stage: GenerationStage, move: Concede) -> None:
    """Withdraw a copy if another copy goes on elsewhere."""
    tracked = fleet.engines[move.engine]
    holders = fleet.holders(stage, move.id)
    others = [one for one in holders if one is not tracked and one.is_at(stage)]
    if tracked in holders and others and stage.races.has(move.id, tracked.index):
        # `_take` leaves out a copy that has finished meanwhile: that copy wins.
        for request in await _take(fleet, tracked, [move.id]):
            num_tokens = num_response_tokens(request)
            stage.races.concede(move.id, tracked.index, num_tokens)


async def _withdraw(
    fleet: Fleet, stage: GenerationStage, tracked: TrackedEngine, ids: Sequence[RequestId]
) -> None:
    """Withdraw losing copies. For finished or dead copies, use the last reported token
    count."""
    num_tokens = {id: tracked.num_tokens(id) for id in ids}
    num_tokens |= {r.id: num_response_tokens(r) for r in await _take(fleet, tracked, ids)}
    for id in ids:
        tracked.forget(id)
        stage.races.lose(id, tracked.index, num_tokens[id])


async def _redraft(fleet: Fleet, stage: GenerationStage, moves: Sequence[Redraft]) -> None:
    """Change drafting settings with one call to each engine, because a call may wait for the
    end of a decoding step."""
    settings: dict[int, dict[RequestId, DraftSetting]] = defaultdict(dict)
    for move in moves:
        tracked = fleet.engines[move.engine]
        if tracked.is_at(stage) and move.id in tracked.unfinished:
            settings[move.engine][move.id] = move.drafting
    await gather_all(fleet.engines[i].redraft(own) for i, own in settings.items())


async def _start(fleet: Fleet, stage: GenerationStage, moves: Sequence[Start]) -> None:
    """Start waiting requests, with one call to each engine, which then prefills them
    together."""
    started: dict[int, list[RolloutRequest]] = defaultdict(list)
    for move in moves:
        there = fleet.engines[move.to_engine].is_at(stage)
        if there and (request := stage.waiting.pop(move.id, None)):
            started[move.to_engine].append(request)
    await gather_all(fleet.engines[i].add(own) for i, own in started.items())


async def _transfer(
    fleet: Fleet, stage: GenerationStage, later: GenerationStage | None, move: Migrate | Defer
) -> None:
    holders = fleet.holders(stage, move.id)
    if len(holders) != 1 or not holders[0].is_at(stage):
        return  # The request has finished, is raced, or its engine cannot give it away.
    if any(fleet.preparations.of(move.id)):
        return  # It is about to be raced or to migrate.
    (origin,), target = holders, fleet.engines[move.to_engine]
    match move:
        case Migrate() if target.is_at(stage) and target is not origin:
            if _moves_kv(fleet, stage, origin, move):
                _save_ahead(fleet, stage, origin, move)
            else:
                await _migrate(fleet, stage, origin, target, move.id)
        case Defer() if later and later.takes_deferred and stage.num_deferrable:
            await _defer(fleet, stage, later, origin, target, move.id)


async def _race(fleet: Fleet, stage: GenerationStage, moves: Sequence[Race]) -> None:
    """Ask each engine once for all copies that races need from it: it pauses while it saves keys
    and values."""
    first: dict[tuple[RequestId, int], Race] = {}
    for move in moves:
        first.setdefault((move.id, move.to_engine), move)
    by_origin: dict[tuple[int, bool], list[Race]] = defaultdict(list)
    for move in first.values():
        if (origin := _origin(fleet, stage, move)) and not _promised(fleet, move):
            by_origin[origin.index, _moves_kv(fleet, stage, origin, move)].append(move)
    for (index, keep_kv), races in by_origin.items():
        origin, ids = fleet.engines[index], list({move.id: None for move in races})
        preparation = _prepare(fleet, stage, origin, races)
        if origin.takes_requests:
            fleet.preparations.promise(preparation)
            fleet.order(orders.copy, origin, ids, preparation, keep_kv=keep_kv)
        else:  # It has not begun these requests, so there is nothing to ask it for.
            await _make_prepared(fleet, preparation, await origin.copy(ids))


def _save_ahead(fleet: Fleet, stage: GenerationStage, origin: TrackedEngine, move: Migrate) -> None:
    """Order the origin to save most keys and values of a request before it leaves."""
    preparation = _prepare(fleet, stage, origin, [move])
    fleet.preparations.promise(preparation)
    fleet.order(orders.precopy, origin, [move.id], preparation)


def _prepare(
    fleet: Fleet, stage: GenerationStage, origin: TrackedEngine, moves: Sequence[Race | Migrate]
) -> Preparation:
    targets = [fleet.engines[move.to_engine] for move in moves]
    return Preparation(stage, origin, moves, targets)


def _moves_kv(
    fleet: Fleet, stage: GenerationStage, origin: TrackedEngine, move: Race | Migrate
) -> bool:
    """Return whether the request takes its keys and values along."""
    target = fleet.engines[move.to_engine]
    num_tokens = len(origin.unfinished[move.id].prompt_token_ids) + origin.num_tokens(move.id)
    degrees = origin.engine.tp_degree, target.engine.tp_degree
    return origin.shares_memory_with(target) and stage.moves_kv(*degrees, num_tokens)


def _promised(fleet: Fleet, move: Race) -> bool:
    return any(m.to_engine == move.to_engine for m in fleet.preparations.of(move.id))


async def note_copied(
    fleet: Fleet, preparation: Preparation, copies: Sequence[RolloutRequest]
) -> None:
    """Continue the moves that wait for these copies, unless their engine died meanwhile."""
    if fleet.preparations.keep(preparation):
        await _make_prepared(fleet, preparation, copies)


async def _make_prepared(
    fleet: Fleet, preparation: Preparation, copied: Sequence[RolloutRequest]
) -> None:
    """Make the moves that an engine has prepared, if they are still possible."""
    stage, origin = preparation.stage, preparation.origin
    copies = {copy.id: copy for copy in copied}
    for move, target in zip(preparation.moves, preparation.targets, strict=True):
        fleet.changed.add(target.index)
        match move:
            case Race() if move.id in copies and _origin(fleet, stage, move, origin):
                _begin_race(fleet, stage, origin, target, copies[move.id], move)
            case Migrate() if target.is_at(stage) and origin.is_at(stage):
                if fleet.holders(stage, move.id) == [origin]:
                    await _migrate(fleet, stage, origin, target, move.id, keep_kv=True)


def _origin(
    fleet: Fleet, stage: GenerationStage, move: Race, origin: TrackedEngine | None = None
) -> TrackedEngine | None:
    """Return the engine to copy a request from: `origin`, or the one with most of its tokens.
    None if the race is impossible."""
    target, holders = fleet.engines[move.to_engine], fleet.holders(stage, move.id)
    if not target.is_at(stage) or target in holders:
        return None
    working = [one for one in holders if one.is_at(stage) and origin in (None, one)]
    return max(working, key=lambda one: one.num_tokens(move.id), default=None)


def _begin_race(
    fleet: Fleet,
    stage: GenerationStage,
    origin: TrackedEngine,
    target: TrackedEngine,
    copy: RolloutRequest,
    move: Race,
) -> None:
    num_tokens, with_kv = num_response_tokens(copy), copy.kv is not None
    stage.races.begin(copy.id, origin.index, target.index, num_tokens, with_kv=with_kv)
    fleet.timeline_log.note(MoveKind.RACED, copy, origin, target)
    fleet.give(target, replace(copy, drafting=move.drafting))


async def _migrate(
    fleet: Fleet,
    stage: GenerationStage,
    origin: TrackedEngine,
    target: TrackedEngine,
    id: RequestId,
    *,
    keep_kv: bool = False,
) -> None:
    for request in await _take(fleet, origin, [id], keep_kv=keep_kv):
        stage.num_migrated += 1
        stage.num_migrated_with_kv += request.kv is not None
        fleet.timeline_log.note(MoveKind.MIGRATED, request, origin, target)
        await target.add([request])


async def _defer(
    fleet: Fleet,
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
    await _defer_all(fleet, stage, later, origin, welcome[0], [id])


async def _close(fleet: Fleet, stage: GenerationStage, later: GenerationStage) -> None:
    for tracked in fleet.engines.values():
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
            await _defer_all(fleet, stage, later, tracked, tracked, ids[: stage.num_deferrable])


async def _defer_all(
    fleet: Fleet,
    stage: GenerationStage,
    later: GenerationStage,
    origin: TrackedEngine,
    target: TrackedEngine,
    ids: Sequence[RequestId],
) -> None:
    taken = await _take(fleet, origin, ids)
    for request in taken:
        fleet.timeline_log.note(MoveKind.DEFERRED, request, origin, target)
    deferred = [stage.defer_to(later, request) for request in taken]
    if target.index in later.queues:
        # Deferred requests are the longest, so they go first.
        later.queues[target.index][:0] = deferred
    else:
        await target.add(deferred, None if target.stage is later else later)


async def _take(
    fleet: Fleet, tracked: TrackedEngine, ids: Sequence[RequestId], *, keep_kv: bool = False
) -> list[RolloutRequest]:
    fleet.changed.add(tracked.index)
    return await tracked.take(ids, keep_kv=keep_kv)
