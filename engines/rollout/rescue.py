"""Requests of dead engines go to others, at once or when it is known that one will not come back.

    dies ─► copies elsewhere go on ─► its pool retreats, or others of the stage take its requests
    gone ─► others take what it still has, and what it had to come; where none is left at a stage,
            engines that have gone on come back to it

No request is twice among the unfinished, and a stage's requests are with engines that will do them.
"""

from collections.abc import Sequence

from engines.rollout.fleet import Fleet
from engines.rollout.interface import EngineDied, EngineGone
from engines.rollout.reshape import Reshaper
from engines.rollout.stage import GenerationStage
from engines.rollout.tracked_engine import TrackedEngine
from schemas.rollout import RolloutRequest


class Rescuer:
    """Finds engines for the requests of those that die."""

    def __init__(self, fleet: Fleet, reshaper: Reshaper, stages: Sequence[GenerationStage]) -> None:
        """`stages`: those under way, at any time."""
        self._fleet = fleet
        self._reshaper = reshaper
        self._stages = stages

    async def on_death(self, tracked: TrackedEngine, death: EngineDied) -> None:
        if not tracked.alive:
            return  # Its pump and its weight sync met the same death.
        await self._fleet.bury(tracked, death)
        self._reshaper.drop_precopy(tracked)
        if (stage := tracked.stage) and stage in self._stages:
            await self._save(tracked, stage)
        if not tracked.standby:
            self._fleet.restart(tracked)

    async def _save(self, tracked: TrackedEngine, stage: GenerationStage) -> None:
        tracked.tally.num_restarts += 1
        self._drop_copies(tracked, stage)
        if not await self._reshaper.retreat(tracked, stage):
            await self._rescue(tracked, stage)
        for one in self._fleet.engines.values():
            if one.gone and one.unfinished:
                await self._bequeath(one, stage)  # Its pool has come back to it.

    async def on_gone(self, tracked: TrackedEngine, gone: EngineGone) -> None:
        self._fleet.lose(tracked, gone)
        for stage in self._stages:
            await self._bequeath(tracked, stage)
        if self._stages:
            for index in self._fleet.take_lost():
                self._stages[0].tallies[index].gone = True
        # The weights of stages that are held here would stay in the object store.
        tracked.stage = None
        tracked.waiting.clear()

    def _drop_copies(self, tracked: TrackedEngine, stage: GenerationStage) -> None:
        """Leave raced requests of a dead engine to the engines that have them too."""
        for id in list(tracked.unfinished):
            if len(self._fleet.holders(stage, id)) > 1:
                stage.races.drop(id, tracked.index)
                tracked.forget(id)

    async def _rescue(self, tracked: TrackedEngine, stage: GenerationStage) -> None:
        """Spread its requests over the engines that are at the same stage or have yet to come to
        it; without one they wait for the restart, of another engine if its GPUs are not its own."""
        others = [o for o in self._fleet.engines.values() if o.alive and o.may_serve(stage)]
        if not others and tracked.standby:
            others = [mate for mate in tracked.mates if mate.may_serve(stage)]
        if others:
            await self._spread(stage, tracked.leave_unfinished(), others)

    async def _bequeath(self, gone: TrackedEngine, stage: GenerationStage) -> None:
        """Spread what an engine has or would have of a stage, and will not do. Where no engine may
        serve the stage any more, those that are left come back to it."""
        orphans = stage.queues.pop(gone.index, [])
        if gone.stage is stage:
            orphans += gone.leave_unfinished()
        if not orphans:
            return
        heirs = [one for one in self._fleet.engines.values() if one.may_serve(stage)]
        if not heirs:
            heirs = self._fleet.left()
            for tracked in heirs:
                stage.queues[tracked.index] = []
                tracked.waiting.appendleft(stage)
                self._fleet.changed.add(tracked.index)
        await self._spread(stage, orphans, [one for one in heirs if one.alive] or heirs)

    async def _spread(
        self,
        stage: GenerationStage,
        orphans: Sequence[RolloutRequest],
        others: Sequence[TrackedEngine],
    ) -> None:
        for i, other in enumerate(others):
            share = orphans[i :: len(others)]
            if other.index in stage.queues:
                stage.queues[other.index].extend(share)
            else:
                await other.give(share)
