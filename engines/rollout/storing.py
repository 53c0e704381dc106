"""Store the finished rollouts of several engines at the same time.

The coordinator handles one report after the other, and waits until the store has each. A write
takes about 10 ms for any number of rows. So with the rollouts of one engine, the coordinator also
hands over those of the reports that come next in the inbox, and the store writes all at once.
"""

import asyncio
from collections.abc import Sequence

from refrain.engines.bounded import cancel
from refrain.engines.rollout.fleet import Fleet
from refrain.engines.rollout.interface import Finished
from refrain.engines.rollout.stage import GenerationStage
from refrain.engines.rollout.tracked_engine import TrackedEngine


class Storing:
    """Finished rollouts on their way to the store."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._ahead: dict[int, tuple[list[Finished], asyncio.Task[None]]] = {}
        """Rollouts of reports that the coordinator has yet to handle, by engine."""

    async def store(
        self, tracked: TrackedEngine, stage: GenerationStage, finished: list[Finished]
    ) -> None:
        """Store an engine's rollouts. Raise as `stage.on_finished` does."""
        ahead, task = self._ahead.pop(tracked.index, ([], None))
        self._begin_next()
        if task and [one.id for one in ahead] == [one.id for one in finished]:
            await task
            # If all have been stored, the coordinator would handle all reports in one turn of the
            # event loop.
            await asyncio.sleep(0)
        else:
            await stage.on_finished(finished)

    def _begin_next(self) -> None:
        """Begin to store the rollouts of the next reports, up to one of another kind: what that one
        changes may decide whether a rollout counts."""
        for index, events in self._fleet.inbox.next_events():
            tracked = self._fleet.engines[index]
            stage = tracked.stage
            if index in self._ahead or stage is None or tracked.entering or tracked.earlier:
                continue
            finished = [one for one in events.finished if one.id in tracked.unfinished]
            # The copies of a raced request may all have finished: only the first one counts.
            if finished and not any(stage.races.has(one.id, index) for one in finished):
                task = asyncio.ensure_future(_stored(stage, finished))
                self._ahead[index] = finished, task

    async def stop(self) -> None:
        """Forget what is on its way. The coordinator stores it again when it handles the report."""
        tasks = [task for _, task in self._ahead.values()]
        self._ahead.clear()
        await cancel(tasks)


async def _stored(stage: GenerationStage, finished: Sequence[Finished]) -> None:
    await stage.on_finished(finished)
