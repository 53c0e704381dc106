"""Simulate consecutive steps on virtual GPUs with the real coordinator, policies and turns.

    sync, shared       roll out 1 ─ hand over ─ train 1 ─ hand over ─ roll out 2 ─ ...
    sync, split        roll out 1 ─ train 1 ─ weights ─ roll out 2 ─ ...
    pipelined, split   roll out 1 ─ roll out 2 ─ roll out 3 ─ ...
                                    train 1      train 2

Step s rolls out with policy version s - 1 in sync mode, and s - 2 in pipelined mode. In pipelined
mode, an engine starts the next step when it has no requests of the step before. A step that is
listed twice runs twice.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from refrain.engines.gpus.gpu_sharing import Role, Turns
from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.stage import Outcome
from refrain.engines.simulate.clock import run_virtual
from refrain.engines.simulate.cluster import PolicySet
from refrain.engines.simulate.engine import VirtualEngine
from refrain.engines.simulate.handover import Handover
from refrain.schemas.rollout import Rollout, RolloutRequest, Split
from refrain.schemas.simulate import Mode
from refrain.schemas.weights import PolicyWeights

LAG: Mapping[Mode, int] = {"sync": 1, "pipelined": 2}
"""Versions by which a step's policy version is behind the step. As many first steps are warm-up."""


@dataclass(frozen=True, slots=True)
class CourseStep:
    """One step: its requests, the history of their prompts, and its training time."""

    requests: Mapping[str, Sequence[RolloutRequest]]
    """Requests by prompt key."""
    history: Mapping[str, float]
    """Earlier median response tokens by prompt key."""
    train_s: float

    @property
    def num_rollouts(self) -> int:
        return sum(len(group) for group in self.requests.values())


@dataclass(frozen=True, slots=True)
class CourseTimes:
    """Times of the steps after the warm-up."""

    start_s: float
    end_s: float
    rollout_s: float
    train_s: float
    training_s: tuple[tuple[float, float], ...]
    """Start and end of each training."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(slots=True)
class _VirtualTrainer:
    """A trainer that spends time to leave the GPUs and to take them again."""

    handover: Handover

    async def leave_gpus(self) -> None:
        await asyncio.sleep(self.handover.leave_s)

    async def enter_gpus(self) -> None:
        await asyncio.sleep(self.handover.enter_s)


@dataclass(slots=True)
class _CourseRun:
    """Drives the coordinator and the turns through the steps."""

    steps: Sequence[CourseStep]
    policy_set: PolicySet
    coordinator: Coordinator
    engines: Sequence[VirtualEngine]
    handover: Handover
    lag: int
    turns: Turns
    outcomes: list[Outcome] = field(default_factory=list)
    training_s: list[tuple[float, float]] = field(default_factory=list)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        await self.coordinator.start()
        for engine in self.engines:
            await engine.set_drafting(self.policy_set.setting)
        trained: list[asyncio.Task[None]] = [loop.create_task(asyncio.sleep(0.0))]
        for place, step in enumerate(self.steps, start=1):
            await trained[max(0, place - self.lag)]
            stage = loop.create_task(self._roll_out(place, step))
            trained.append(loop.create_task(self._train(step, stage, trained[-1])))
        await asyncio.gather(*trained)
        await self.coordinator.shutdown()

    async def _roll_out(self, place: int, step: CourseStep) -> None:
        groups = self.policy_set.placement(list(step.requests), step.history, len(self.engines))
        placed = [(group.engine, r) for group in groups for r in step.requests[group.prompt_key]]

        async def note(_: Sequence[Rollout]) -> None:
            pass

        async with self.turns.of(Role.ENGINES):
            outcome = await self.coordinator.roll_out(
                placed,
                note,
                weights=PolicyWeights(max(0, place - self.lag), b"", ()),
                label=f"{Split.TRAIN}/{place}",
            )
        self.outcomes.append(outcome)

    async def _train(
        self, step: CourseStep, stage: asyncio.Task[None], before: asyncio.Task[None]
    ) -> None:
        await asyncio.gather(stage, before)
        loop = asyncio.get_running_loop()
        async with self.turns.of(Role.TRAINER):
            start_s = loop.time()
            await asyncio.sleep(step.train_s + self.handover.weights_out_s)
            self.training_s.append((start_s, loop.time()))


def run_course(
    steps: Sequence[CourseStep],
    engines: Sequence[VirtualEngine],
    policy_set: PolicySet,
    handover: Handover,
    *,
    lag: int,
    shared: bool,
) -> CourseTimes:
    """Simulate the steps and return their times without the first `lag` steps. Deterministic."""
    coordinator = Coordinator(engines, policy_set.policies)
    owners = {Role.ENGINES: coordinator, Role.TRAINER: _VirtualTrainer(handover)}
    turns = Turns(owners if shared else {}, Role.ENGINES)
    run = _CourseRun(steps, policy_set, coordinator, engines, handover, lag, turns)
    run_virtual(run.run())
    rollouts = [outcome.finished_s - outcome.started_s for outcome in run.outcomes[lag:]]
    trainings = run.training_s[lag:]
    return CourseTimes(
        start_s=run.training_s[lag - 1][1],
        end_s=trainings[-1][1],
        rollout_s=fmean(rollouts),
        train_s=fmean(end_s - start_s for start_s, end_s in trainings),
        training_s=tuple(trainings),
    )
