"""Milestones of a run's steps. Tasks wait until a step has reached one."""

import asyncio
from typing import Any, Generic, TypeVar

from refrain.schemas.step import StepReport
from refrain.schemas.weights import PolicyWeights

T = TypeVar("T")


class Milestone(Generic[T]):
    """The number of the last step that reached a milestone, with a value from each recent step.

    A wait has no timeout, but it ends with its flow: a step that fails cancels the others.
    """

    def __init__(self, reached: int, left: T, num_kept: int = 1) -> None:
        """`left`: value of the step `reached`. `num_kept`: number of latest values to keep."""
        self.reached = reached
        self._left = {reached: left}
        self._num_kept = num_kept
        self._moved = asyncio.Condition()

    @property
    def last(self) -> T:
        """Value of the last step that reached the milestone."""
        return self._left[self.reached]

    async def reach(self, step: int, left: T) -> None:
        """Mark the milestone as reached by `step`, with its value. Wait for the step before."""
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
        """Wait until a step has reached the milestone, and return its value."""
        await self.wait(step)
        return self._left[step]


class Milestones:
    """The milestones of a run's steps, in the process of its flow.

    begun       the step's flow has begun; the value is its call in Prefect's graph
    queued      its rollouts are queued at the engines, behind those of the step before
    published   its policy version is available to the engines
    validated   its policy version is validated, if that is due
    reported    it is trained, and its metrics are written
    committed   its checkpoint is saved, if one is due. The next step's rollouts run meanwhile,
                unless the trainer's state must leave the GPUs first
    drawn       its pages are made
    """

    # Use slots: Prefect records a flow's arguments, and looks into objects with a `__dict__`.
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
        """`weights`: of the run's current policy version. `queued`: the engines' milestone.
        `validates`: the run marks each policy version as validated, even if none is due."""
        step = weights.policy_version
        self._max_staleness = max_staleness
        self._num_steps = num_steps
        # Keep the values of all steps that a validation or a later step may still wait for.
        self.begun = Milestone[list[Any] | None](step, None, num_kept=2 + max_staleness)
        self.queued = queued
        self.published = Milestone(step, weights, num_kept=1 + max_staleness)
        self.validated = Milestone[None](step - max_staleness - 1 if validates else num_steps, None)
        self.reported = Milestone[None](step, None)
        self.committed = Milestone[None](step, None)
        self.drawn = Milestone[StepReport | None](step, None)

    async def admits(self, step: int) -> None:
        """Return when the flow of a step may be created. A pipelined run creates it early, because
        this takes Prefect a moment."""
        await self.turn(step - self._max_staleness)

    async def turn(self, step: int) -> None:
        """Return when a step may begin: after the step before, or in a pipelined run as soon as
        that one's rollouts are queued."""
        await (self.queued if self._max_staleness else self.reported).wait(step - 1)

    async def next_is_queued(self, step: int) -> None:
        """Return when the rollouts of the next step are queued, if there is one. Work that delays
        no step can then begin."""
        await self.queued.wait(min(step + 1, self._num_steps))
