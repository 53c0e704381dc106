"""How far a run has come, and waiting until it has come so far."""

import asyncio


class Milestone:
    """A count of steps that only grows. A wait ends with the flow it is part of: a step that fails
    ends the others."""

    def __init__(self, reached: int) -> None:
        self.reached = reached
        self._moved = asyncio.Condition()

    async def reach(self, step: int) -> None:
        assert step == self.reached + 1, f"step {step} after step {self.reached}"
        async with self._moved:
            self.reached = step
            self._moved.notify_all()

    async def wait(self, step: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self.reached >= step)


class Milestones:
    """Of the steps of a run.

    queued     its rollouts are queued at the engines, behind those of the step before
    published  its policy version is there for the engines
    committed  reported, and saved where a checkpoint is due
    drawn      with pictures and pages
    """

    def __init__(self, step: int) -> None:
        self.queued = Milestone(step)
        self.published = Milestone(step)
        self.committed = Milestone(step)
        self.drawn = Milestone(step)
