"""Orders to an engine, which `Fleet.order` carries out one by one. Each returns a report."""

from collections.abc import Sequence

from refrain.engines.rollout.engine_reports import Copied, Refreshed, Signal, Synced
from refrain.engines.rollout.interface import EngineDied
from refrain.engines.rollout.stage import GenerationStage
from refrain.engines.rollout.tracked_engine import TrackedEngine, now_s
from refrain.schemas.rollout import RequestId, SavedKV
from refrain.schemas.timeline import Activity


async def sync(tracked: TrackedEngine, stage: GenerationStage) -> Synced:
    """Load the stage's weights, unless the engine has them."""
    return Synced(*await _load(tracked, stage))


async def refresh(tracked: TrackedEngine, stage: GenerationStage) -> Refreshed:
    """Load the stage's weights into a parked engine."""
    return Refreshed(*await _load(tracked, stage))


async def _load(tracked: TrackedEngine, stage: GenerationStage) -> tuple[float | None, float]:
    """Return the canary error, or None if the engine had the weights, and the seconds taken."""
    started_s, error = now_s(), None
    if tracked.version != stage.weights.policy_version:
        tracked.begin(Activity.SYNC, stage.label)
        error = await tracked.engine.load_weights(stage.weights)
        tracked.version = stage.weights.policy_version
    if tracked.standby:
        tracked.rest()
    return error, now_s() - started_s


async def precopy(tracked: TrackedEngine, ids: Sequence[RequestId], of: object) -> Copied:
    """Save keys and values of these requests while they continue."""
    there = tracked.takes_requests and ids
    return Copied(of, await tracked.engine.precopy(ids) if there else None)


async def copy(
    tracked: TrackedEngine, ids: Sequence[RequestId], of: object, *, keep_kv: bool
) -> Copied:
    """Copy these requests, with their keys and values if `keep_kv`, while they continue."""
    there = [id for id in ids if id in tracked.unfinished]
    copies = await tracked.copy(there, keep_kv=keep_kv) if there else ()
    return Copied(of, copies=tuple(copies))


async def submit(tracked: TrackedEngine, ids: Sequence[RequestId]) -> Signal:
    """Submit those of these requests that are still the engine's."""
    if tracked.takes_requests:
        await tracked.submit([tracked.unfinished[id] for id in ids if id in tracked.unfinished])
    return Signal.SUBMITTED


async def expect_kv(tracked: TrackedEngine, saved: Sequence[SavedKV], of: object) -> Copied:
    """Let a parked engine prepare for loading these saved keys and values."""
    if tracked.standby:
        await tracked.engine.expect_kv(saved)
    return Copied(of)


async def park(tracked: TrackedEngine) -> Signal:
    """Release the engine's GPUs."""
    if not tracked.holds_gpus:
        return Signal.PARKED
    try:
        await tracked.engine.park()
    except EngineDied:
        # Other engines take these GPUs after this order, so no process may remain.
        await tracked.engine.kill()
        raise
    finally:
        tracked.holds_gpus = False
    return Signal.PARKED


async def wake(tracked: TrackedEngine) -> Signal:
    """Take the GPUs, which nobody else has now."""
    if tracked.standby:
        # Another layout owns these GPUs now, so do not wake the engine.
        return Signal.PARKED
    tracked.begin(Activity.SWITCH, tracked.label)
    tracked.holds_gpus = True
    if not await tracked.engine.wake():
        tracked.version = None
    tracked.woken_s = now_s()
    return Signal.WOKEN
