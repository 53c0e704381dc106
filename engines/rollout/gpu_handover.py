"""Hand the GPUs to the trainer between stages, and take them back.

    leave   all engines sleep, those on standby too; processes of engines that die are killed
    enter   engines of the base layout wake, without weights; the next stage handles deaths

Call these only when the engines are settled: no order and no stage may be under way.
"""

from refrain.engines.bounded import gather_all
from refrain.engines.rollout.fleet import Fleet
from refrain.engines.rollout.interface import EngineDied
from refrain.engines.rollout.tracked_engine import TrackedEngine
from refrain.schemas.timeline import Activity


async def leave(fleet: Fleet) -> None:
    """Make every engine release its GPUs. Raises `EngineDied` when the processes of a dead engine
    do not end."""
    for tracked in fleet.base:
        if not tracked.gone:
            tracked.begin(Activity.SWITCH)
    await gather_all(_sleep(fleet, tracked) for tracked in fleet.engines.values() if tracked.alive)
    for tracked in fleet.base:
        if not tracked.gone:
            tracked.stand_by()
            tracked.begin(Activity.TRAINING)


async def enter(fleet: Fleet) -> None:
    """Make the engines of the base layout take their GPUs back."""
    there = [tracked for tracked in fleet.base if tracked.standby]
    for tracked in there:
        tracked.begin(Activity.SWITCH)
        tracked.leave_standby()
    await gather_all(_wake(fleet, tracked) for tracked in there if tracked.alive)


async def _sleep(fleet: Fleet, tracked: TrackedEngine) -> None:
    tracked.version = None
    try:
        await tracked.engine.sleep()
    except EngineDied as death:
        await tracked.engine.kill()
        await fleet.inbox.put((tracked.index, death))
    tracked.holds_gpus = False


async def _wake(fleet: Fleet, tracked: TrackedEngine) -> None:
    tracked.holds_gpus = True
    try:
        await tracked.engine.wake()
    except EngineDied as death:
        await fleet.inbox.put((tracked.index, death))
    else:
        tracked.serve()
