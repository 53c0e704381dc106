"""How far a run has come, and waiting until it has come so far."""

import asyncio
from typing import Any, Generic, TypeVar

from schemas.step import StepReport
from schemas.weights import PolicyWeights

T = TypeVar("T")


class Milestone(Generic[T]):
    """A count of steps that only grows, with what the last ones of them left. A wait ends with the
    flow it is part of: a step that fails ends the others."""

    def __init__(self, reached: int, left: T, num_kept: int = 1) -> None:
        """`left`: by the step that is reached already."""
        self.reached = reached
        self._left = {reached: left}
        self._num_kept = num_kept
        self._moved = asyncio.Condition()

    @property
    def last(self) -> T:
        """Legacy of the last step."""
        return self._left[self.reached]

    async def reach(self, step: int, left: T) -> None:
        """One step after the other."""
        assert step > self.reached, f"step {step} after step {self.reached}"
        async with self._moved:
            await self._moved.wait_for(lambda: self.reached == step - 1)
            self.reached = step
            self._left[step] = left
            self._left.pop(step - self._num_kept, None)
            self._moved.notify_all()

    async def wait(self, step: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self.reached >= step)

    async def left_by(self, step: int) -> T:
        """Legacy of a step, once it has reached the milestone."""
        await self.wait(step)
        return self._left[step]


class Milestones:
    """How far the steps of a run have come, in the process of its flow.

    begun       its flow, with what Prefect's graph knows it by
    queued      its rollouts are queued at the engines, behind those of the step before
    published   its policy version is there for the engines
    validated   its policy version is validated, where that is due
    reported    trained, and its figures are written
    committed   saved, where a checkpoint is due; the next step generates meanwhile, unless the
                trainer's state must leave the GPUs for that
    drawn       with pictures and pages
    """

    # Without a dictionary: Prefect writes down what a flow is given as far as it can look into it.
    __slots__ = (
        "_max_staleness",
        "_num_steps",
        "begun",
        "committed",
        "drawn",
        "published",
        "queued",
        "reported",
        "validated",
    )

    def __init__(
        self,
        weights: PolicyWeights,
        max_staleness: int,
        num_steps: int,
        queued: Milestone[None],
        *,
        validates: bool = False,
    ) -> None:
        """`weights`: of the policy version that the run is at; `queued`: the engines' own;
        `validates`: somebody says of each policy version that it is validated, or need not be."""
        step = weights.policy_version
        self._max_staleness = max_staleness
        self._num_steps = num_steps
        # Of those at which a validation or a step may begin to look.
        self.begun = Milestone[list[Any] | None](step, None, num_kept=2 + max_staleness)
        self.queued = queued
        self.published = Milestone(step, weights, num_kept=1 + max_staleness)
        self.validated = Milestone[None](step - max_staleness - 1 if validates else num_steps, None)
        self.reported = Milestone[None](step, None)
        self.committed = Milestone[None](step, None)
        self.drawn = Milestone[StepReport | None](step, None)

    async def admits(self, step: int) -> None:
        """Return when a step's flow may be made. In a pipeline one is made beforehand: it takes
        Prefect a moment."""
        await self.turn(step - self._max_staleness)

    async def turn(self, step: int) -> None:
        """Return when a step may begin: in a pipeline behind the rollouts of the one before."""
        await (self.queued if self._max_staleness else self.reported).wait(step - 1)

    async def next_is_queued(self, step: int) -> None:
        """Return when the step after this one is generating, if there is one: then there is time
        for what holds up no step."""
        await self.queued.wait(min(step + 1, self._num_steps))
