"""Consecutive steps that overlap on a virtual cluster, with the real coordinator and policies.

    step   1: roll_out ──────────────► train ─► version 1
           2:  roll_out ───────────────────► train ─► version 2
           3:                   version 1 ─► roll_out ──────► ...

Step s, counted from the first, rolls out with version max(0, s - 2), so its samples are at most one
step old (RhymeRL 3.2: "the off-policyness is 1"): training s turns version s - 1 into s.
`roll_out(s)` starts when that of step s - 1 has started and its version exists. An engine begins it
when it has nothing left of step s - 1. Version s exists `train_s` after the last rollout of step s
and after version s - 1. With a barrier, as in veRL with stale weights (one step off), `roll_out(s)`
also waits for the last rollout of step s - 1. With a staleness of k (here 1), step s rolls out with
version max(0, s - 1 - k). On-policy, k is 0 and it waits for the training of step s - 1.

Deviations: reward takes no time, and training takes the same time at every step.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from refrain.benchmarks.papers.script import Script, StepScript
from refrain.benchmarks.papers.windows import GatedHistory
from refrain.engines.latency.interface import Latency
from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.moves import Policy
from refrain.engines.rollout.stage import Outcome
from refrain.engines.simulate.clock import run_virtual
from refrain.engines.simulate.cluster import check_latency
from refrain.engines.simulate.engine import VirtualEngine
from refrain.schemas.drafting import HISTORY
from refrain.schemas.rollout import DraftSetting, RequestId, Rollout, Split
from refrain.schemas.simulate import ClusterLayout, PipelinedStep, SimulatedPipeline
from refrain.schemas.step import StepPlan
from refrain.schemas.weights import PolicyWeights

WARM_UP = 2
"""Steps left out at the beginning, when all engines begin together. One of either parity."""
COOL_DOWN = 2
"""Steps left out at the end, when no step waits for the engines."""

Planner = Callable[[StepScript, int], StepPlan]
"""(step, number of engines) -> the engine of each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """How consecutive steps run."""

    name: str
    plan: Planner
    barrier: bool = False
    """Whether the next step waits for the last rollout of this one."""
    staleness: int = 1
    """Versions between the one that generates and the one that is trained. 0: on-policy. A step may
    begin when it is trained at most so many versions later."""
    apart: bool = False
    """Whether samples go to engines round-robin, one by one, and not with their prompt."""
    in_flight: bool = False
    """Whether engines begin a step with requests of the one before."""
    queue: Callable[[StepScript, int], Policy] | None = None
    """(step, number of engines) -> the policy that starts its samples from one queue. None: engines
    have their samples when the step begins."""
    policies: Callable[[StepPlan], Sequence[Policy]] | None = None
    report_s: float | None = None
    """Seconds between two reports of an engine. None: it reports finished rollouts only."""
    drafting: GatedHistory | None = None
    """How engines draft from history. None: not at all."""
    oversample: float | None = None
    """Samples of a step beyond those it needs, as a share of these. So many may be deferred. None:
    none may. Deviation: a run draws more prompts for it; here the trace's steps include them."""

    @property
    def lag(self) -> int:
        """Steps between a step and its policy version: 2 with a staleness of 1."""
        return self.staleness + 1


def simulate_pipeline(
    script: Script,
    cluster: ClusterLayout,
    latency: Latency,
    configuration: Configuration,
    *,
    train_s: float = 0.0,
    sync_s: float = 0.0,
) -> SimulatedPipeline:
    """Simulate the steps. Deterministic. `train_s`: of one step; `sync_s`: of one engine.

    Raise ValueError if there are too few steps to leave some out at both ends, or if the latency
    model lacks points.
    """
    if len(script.steps) <= WARM_UP + COOL_DOWN:
        raise ValueError(
            f"{len(script.steps)} steps are too few: {WARM_UP} at the beginning and {COOL_DOWN} at "
            "the end are left out"
        )
    setting = DraftSetting(HISTORY, 1) if configuration.drafting else None
    check_latency(latency, cluster.tp_degree, setting)
    engines = _engines(script, cluster, latency, configuration, sync_s)
    coordinator = Coordinator(engines)
    course = _PipelineRun(script, configuration, coordinator, cluster.num_engines, train_s)
    run_virtual(course.run())
    _check(script, course)
    return _measure(configuration.name, script, course)


def version_of(place: int, lag: int) -> int:
    """Return the policy version with which the step at `place` rolls out. The first place is 1."""
    return max(0, place - lag)


def oldest_version(rollout: Rollout) -> int:
    """Return the version of the rollout's first token."""
    return min(span.policy_version for span in rollout.generated.spans)


def pipelined_step(
    step: int,
    rollouts: Sequence[Rollout],
    own: Sequence[int],
    deferred: Sequence[int] = (),
    *,
    called_s: float,
    finished_s: float,
    num_planned: int,
    num_migrated: int = 0,
    num_deferred: int = 0,
) -> PipelinedStep:
    """Return the report of a step. `own`, `deferred`: staleness of each of its own rollouts, and of
    each rollout that was deferred to it."""
    return PipelinedStep(
        step=step,
        called_s=called_s,
        finished_s=finished_s,
        num_planned=num_planned,
        num_rollouts=len(rollouts),
        num_tokens=sum(len(rollout.generated.token_ids) for rollout in rollouts),
        num_migrated=num_migrated,
        num_deferred=num_deferred,
        staleness=max(own, default=0),
        deferred_staleness=max(deferred, default=0),
        mean_staleness=fmean((*own, *deferred)),
    )


def _engines(
    script: Script,
    cluster: ClusterLayout,
    latency: Latency,
    configuration: Configuration,
    sync_s: float,
) -> list[VirtualEngine]:
    drafting = configuration.drafting
    replays = dict.fromkeys(script.lengths, drafting.by_window) if drafting else None
    return [
        VirtualEngine(
            index,
            cluster.tp_degree,
            latency,
            script.lengths,
            replays=replays,
            choose_drafting=drafting,
            max_num_seqs=cluster.max_num_seqs,
            max_context_tokens=cluster.max_context_tokens,
            report_s=configuration.report_s,
            sync_s=sync_s,
        )
        for index in range(cluster.num_engines)
    ]


@dataclass(slots=True)
class _Step:
    """State of one step."""

    place: int
    called_s: float
    planned_at: dict[RequestId, int] = field(default_factory=dict)
    """Planned engine of each of its own requests."""
    outcome: Outcome | None = None
    finished: list[Rollout] = field(default_factory=list)

    @property
    def num_migrated(self) -> int:
        """Own rollouts that finished on another engine than planned. From a queue: moves."""
        if not self.planned_at and self.outcome:
            return self.outcome.moves.num_migrated
        own = (r for r in self.finished if r.request.deferred_from is None)
        return sum(r.engine != self.planned_at.get(r.request.origin, r.engine) for r in own)

    def stalenesses(self, *, deferred: bool) -> list[int]:
        """Return the staleness of each of its own samples, or of each deferred to it."""
        return [
            self.place - 1 - oldest_version(rollout)
            for rollout in self.finished
            if (rollout.request.deferred_from is not None) is deferred
        ]


@dataclass(slots=True)
class _PipelineRun:
    """Drives the coordinator through the steps."""

    script: Script
    configuration: Configuration
    coordinator: Coordinator
    num_engines: int
    train_s: float
    steps: list[_Step] = field(default_factory=list)
    published_s: list[float] = field(default_factory=lambda: [0.0])
    """When each version was published."""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        await self.coordinator.start()
        phases: list[asyncio.Task[None]] = []
        versions: list[asyncio.Task[None]] = [loop.create_task(asyncio.sleep(0.0))]
        for place, step in enumerate(self.script.steps, start=1):
            await versions[version_of(place, self.configuration.lag)]
            if self.configuration.barrier and phases:
                await phases[-1]
            self.steps.append(_Step(place, loop.time()))
            phases.append(loop.create_task(self._roll_out(self.steps[-1], step)))
            versions.append(loop.create_task(self._train(phases[-1], versions[-1])))
        await asyncio.gather(*versions)
        await self.coordinator.shutdown()

    async def _roll_out(self, record: _Step, step: StepScript) -> None:
        plan = self.configuration.plan(step, self.num_engines)
        placed = [
            (g.engine, request) for g in plan.groups for request in step.requests[g.prompt_key]
        ]
        if self.configuration.apart:
            placed = [(at % self.num_engines, r) for at, (_, r) in enumerate(placed)]
        oversample, queue = self.configuration.oversample, self.configuration.queue
        policies = self.configuration.policies(plan) if self.configuration.policies else ()
        if queue:
            placed = [(None, request) for _, request in placed]
            policies = (queue(step, self.num_engines), *policies)
        record.planned_at = {request.id: engine for engine, request in placed if engine is not None}

        async def note(rollouts: Sequence[Rollout]) -> None:
            record.finished += rollouts

        record.outcome = await self.coordinator.roll_out(
            placed,
            note,
            weights=PolicyWeights(version_of(record.place, self.configuration.lag), b"", ()),
            policies=policies,
            min_rollouts=None if oversample is None else round(len(placed) / (1 + oversample)),
            in_flight=self.configuration.in_flight,
            label=f"{Split.TRAIN}/{step.step}",
        )

    async def _train(self, phase: asyncio.Task[None], before: asyncio.Task[None]) -> None:
        await asyncio.gather(phase, before)
        await asyncio.sleep(self.train_s)
        self.published_s.append(asyncio.get_running_loop().time())


def _check(script: Script, course: _PipelineRun) -> None:
    """Check what every run must satisfy."""
    finished = [rollout for step in course.steps for rollout in step.finished]
    lengths = {r.request.origin: len(r.generated.token_ids) for r in finished}
    assert len(finished) == len(lengths)
    assert lengths == script.lengths, "not the lengths of the trace"
    lag = course.configuration.lag
    for step in course.steps:
        version = version_of(step.place, lag)
        assert step.called_s >= course.published_s[version], "weights of the future"
        staleness = max(step.stalenesses(deferred=False), default=0)
        assert staleness < lag, f"place {step.place} trains on what is {staleness} old"
        assert max(step.stalenesses(deferred=True), default=0) <= lag


def _measure(name: str, script: Script, course: _PipelineRun) -> SimulatedPipeline:
    rows = [
        _row(step, of_script) for step, of_script in zip(course.steps, script.steps, strict=True)
    ]
    start_s, end_s = rows[WARM_UP - 1].finished_s, rows[-COOL_DOWN - 1].finished_s
    timeline = course.coordinator.timeline(start_s, end_s)
    return SimulatedPipeline(
        configuration=name,
        steps=tuple(rows),
        measured=tuple(row.step for row in rows[WARM_UP:-COOL_DOWN]),
        seconds=end_s - start_s,
        idle_shares=tuple(
            timeline.idle_s(engine) / (end_s - start_s) for engine in timeline.engines
        ),
    )


def _row(step: _Step, of_script: StepScript) -> PipelinedStep:
    outcome = step.outcome
    assert outcome is not None
    return pipelined_step(
        of_script.step,
        step.finished,
        step.stalenesses(deferred=False),
        step.stalenesses(deferred=True),
        called_s=step.called_s,
        finished_s=outcome.finished_s,
        num_planned=of_script.num_rollouts,
        num_migrated=step.num_migrated,
        num_deferred=len(outcome.deferred),
    )
