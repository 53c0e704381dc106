"""Move the requests of dead engines to other engines.

    death ─► raced requests continue where their copies are
          ─► conversations get their answered turns back, from the environments' journal
          ─► the pool retreats to its base layout, or engines of the same stage take the requests
    gone  ─► other engines take its current and queued requests. If no engine is left at the stage,
             engines that have moved on to later stages come back

Each unfinished request stays on one engine (or on each engine of its race) that will generate it.
"""

from collections.abc import Sequence

from refrain.engines.rollout.fleet import Fleet
from refrain.engines.rollout.interface import EngineDied, EngineGone
from refrain.engines.rollout.reshape import Reshaper
from refrain.engines.rollout.stage import GenerationStage
from refrain.engines.rollout.tracked_engine import TrackedEngine
from refrain.schemas.rollout import RolloutRequest


async def on_death(
    fleet: Fleet,
    reshaper: Reshaper,
    stages: Sequence[GenerationStage],
    tracked: TrackedEngine,
    death: EngineDied,
) -> None:
    """Handle a death. `stages`: those under way."""
    if not tracked.alive:
        return  # Already handled: the pump and an order may report the same death.
    await fleet.on_death(tracked, death)
    reshaper.drop_precopy(tracked)
    if (stage := tracked.stage) and stage in stages:
        await _move_requests(fleet, reshaper, tracked, stage)
    if not tracked.standby:
        fleet.restart(tracked)


async def _move_requests(
    fleet: Fleet, reshaper: Reshaper, tracked: TrackedEngine, stage: GenerationStage
) -> None:
    tracked.tally.num_restarts += 1
    _drop_copies(fleet, tracked, stage)
    await _recover(tracked, stage)
    if not await reshaper.retreat(tracked, stage):
        await _spread_unfinished(fleet, tracked, stage)
    for one in fleet.engines.values():
        if one.gone and one.unfinished:
            # The retreat put requests on an engine that is gone.
            await _reassign(fleet, one, stage)


async def on_gone(
    fleet: Fleet, stages: Sequence[GenerationStage], tracked: TrackedEngine, gone: EngineGone
) -> None:
    """Continue without an engine. `stages`: those under way."""
    fleet.remove(tracked, gone)
    for stage in stages:
        await _reassign(fleet, tracked, stage)
    if stages:
        for index in fleet.take_lost():
            stages[0].tallies[index].gone = True
    # References to stages would keep their weights in the object store.
    tracked.stage = None
    tracked.waiting.clear()


def _drop_copies(fleet: Fleet, tracked: TrackedEngine, stage: GenerationStage) -> None:
    """Remove the dead engine's copies of raced requests. The other copies go on."""
    for id in list(tracked.unfinished):
        of = tracked.stage_of(id) or stage
        if len(fleet.holders(of, id)) > 1:
            of.races.drop(id, tracked.index)
            tracked.forget(id)


async def _recover(tracked: TrackedEngine, stage: GenerationStage) -> None:
    """Get the answered turns of a dead engine's conversations, which the engine alone had.

    The next engine would sample the same tokens. This saves the time, and the tool calls.
    """
    of_stage: dict[GenerationStage, list[RolloutRequest]] = {}
    for id, request in tracked.unfinished.items():
        if request.task is not None:
            of_stage.setdefault(tracked.earlier.get(id, stage), []).append(request)
    for of, requests in of_stage.items():
        if of.recover:
            # This keeps `earlier`, so the requests stay in their stages.
            tracked.expect(await of.recover(requests))


async def _spread_unfinished(fleet: Fleet, tracked: TrackedEngine, stage: GenerationStage) -> None:
    """Spread the requests over live engines that serve this stage now or later. If there is
    none, the requests wait for the restart. If another layout has the GPUs, they move to its
    engines."""
    others = [o for o in fleet.engines.values() if o.alive and o.may_serve(stage)]
    if not others and tracked.standby:
        others = [sharer for sharer in tracked.gpu_sharers if sharer.may_serve(stage)]
    if others:
        await _spread(stage, tracked.leave_unfinished(), others)


async def _reassign(fleet: Fleet, gone: TrackedEngine, stage: GenerationStage) -> None:
    """Spread a lost engine's current and queued requests of a stage over other engines. If no
    engine serves the stage any more, all engines that are left come back to it."""
    orphans = [(r, gone.earlier.pop(r.id, stage)) for r in stage.queues.pop(gone.index, [])]
    if gone.stage is stage:
        orphans += gone.leave_unfinished()
    if not orphans:
        return
    targets = [one for one in fleet.engines.values() if one.may_serve(stage)]
    if not targets:
        targets = fleet.remaining()
        for tracked in targets:
            stage.queues[tracked.index] = []
            tracked.waiting.appendleft(stage)
            fleet.changed.add(tracked.index)
    await _spread(stage, orphans, [one for one in targets if one.alive] or targets)


async def _spread(
    stage: GenerationStage,
    orphans: Sequence[tuple[RolloutRequest, GenerationStage]],
    others: Sequence[TrackedEngine],
) -> None:
    for i, other in enumerate(others):
        share = orphans[i :: len(others)]
        requests = [request for request, _ in share]
        begins_later = other.index in stage.queues
        theirs = stage if begins_later else other.stage
        other.earlier |= {r.id: of for r, of in share if of is not theirs}
        if begins_later:
            stage.queues[other.index].extend(requests)
        else:
            await other.add(requests)
