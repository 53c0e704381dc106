"""RhymeRL's evaluation (section 7) in its setting: its parts, and the systems beside it (7.1).

    baseline       veRL disaggregated, one step off: prompts dealt round-robin, a barrier after
                   every step; also with the samples of a prompt on different engines (apart)
    on-policy      veRL: the next step begins when this one is trained
    overlapping    refrain's `rollout.placement: even`: no barrier, prompts dealt round-robin;
                   also with drafts from history
    AReaL          no steps (`benchmarks.papers.areal`)
    queue          a step's samples in one queue (`benchmarks.papers.one_queue`)
    alternation    ranking groups ascending and descending in turn (6.2), outliers moved (6.3)
    two-tier       engines of each ranking group by its expected time (6.4)
    HistoSpec      drafts from history (5), as in a run (`benchmarks.papers.history_drafting`)

Migration belongs to RhymeRL's pipeline, so alternation has it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from refrain.benchmarks.papers.areal import Asynchronous, measured_steps, simulate_asynchronous
from refrain.benchmarks.papers.generate import K
from refrain.benchmarks.papers.history_drafting import drafted_levels
from refrain.benchmarks.papers.one_queue import KnownLengths, as_groups, queued
from refrain.benchmarks.papers.pipeline import Configuration, Planner, simulate_pipeline
from refrain.benchmarks.papers.real_run import step_plan, throttled
from refrain.benchmarks.papers.script import StepScript, read_script
from refrain.benchmarks.papers.settings import Overlap, Setting
from refrain.benchmarks.papers.windows import GatedHistory, TokenLatency
from refrain.engines.control.techniques import StepInputs, plan_policies
from refrain.engines.histopipe.estimate import estimate_rollout_s
from refrain.engines.histopipe.passes import fit_passes
from refrain.engines.histopipe.placement import RolloutTime, plan_placement
from refrain.engines.histopipe.ranking import length_growth
from refrain.engines.latency.interface import Latency
from refrain.engines.rollout.moves import Policy
from refrain.engines.simulate.cluster import even
from refrain.engines.simulate.run_config import run_config
from refrain.schemas.config import TrainConfig
from refrain.schemas.scheduling import HistoPipeConfig
from refrain.schemas.simulate import ClusterLayout, SimulatedPipeline
from refrain.schemas.step import PromptGroup, RankingGroup, StepPlan

BASELINE = "veRL, one step off"
PARTS = ("alternation", "two-tier", "HistoSpec")
"""Parts of RhymeRL. Each adds to those before it."""
STALENESS = (1, 8)
"""AReaL's eta in 7.1. With 1 it is as stale as RhymeRL."""
KEPT = (1, 2)
"""Bounds of AReaL's that no sample may exceed."""
OVERSAMPLE = 0.05
"""Share of a step's samples that may be deferred to the next."""
REPORT_S = 5.0
"""Seconds between two reports of an engine: some 150 tokens of each request."""


@dataclass(frozen=True, slots=True)
class PipelineVariant:
    """A configuration, and the one it is compared with."""

    configuration: Configuration | Asynchronous
    over: str | None = None
    """Name of the one that its speed-up is over. None: it is the baseline."""
    part: str | None = None
    """The part of RhymeRL that it adds."""
    system: str | None = None
    """Name among the figures, for a system beside RhymeRL."""
    hindsight: bool = False
    """Whether it knows every length before the step."""

    @property
    def name(self) -> str:
        return self.configuration.name


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """A simulated variant."""

    variant: PipelineVariant
    max_response_tokens: int
    result: SimulatedPipeline
    speedup: float
    """Speed-up in samples per second over `variant.over`."""
    total_speedup: float
    """Speed-up over the baseline."""


def dealt(step: StepScript, num_engines: int) -> StepPlan:
    """Deal prompts to engines round-robin."""
    return _plan(step, even(list(step.requests), {}, num_engines))


def in_turn(
    config: HistoPipeConfig, rollout_time: RolloutTime | None = None, num_groups: int | None = None
) -> Planner:
    """Return HistoPipe's placement, two-tier with `rollout_time`."""

    def plan(step: StepScript, num_engines: int) -> StepPlan:
        placement = plan_placement(
            list(step.requests),
            step.history,
            step.step,
            num_engines,
            step.group_size,
            rollout_time,
            fit_passes(step.history),
            num_groups,
        )
        return _plan(step, placement.groups, placement.ranking_groups, config.min_growth)

    return plan


def migrating(config: TrainConfig, plan: StepPlan) -> Sequence[Policy]:
    """Return the policies of a real run without a latency model: migration (6.3)."""
    policies = plan_policies(config, StepInputs(plan=plan))
    return throttled(policies, REPORT_S / 2)


def simulate_ablation(
    setting: Setting, overlap: Overlap, seed: int, progress: Callable[[str], None]
) -> list[PipelineRow]:
    """Simulate every variant with every maximum. `progress` gets the name of each first."""
    progress("the drafter")
    drafting = _drafting(setting, overlap, seed)
    specs = (setting.spec.model_copy(update={"max_response_tokens": n}) for n in overlap.maxima)
    return [
        row
        for spec in specs
        for row in _simulate_maximum(replace(setting, spec=spec), overlap, seed, drafting, progress)
    ]


def _drafting(setting: Setting, overlap: Overlap, seed: int) -> GatedHistory:
    """Return the drafting of a run in the middle of these steps, for all maxima."""
    middle, tp_degree = overlap.steps[len(overlap.steps) // 2], setting.layout.tp_degree
    trace = setting.trace(seed, (middle,))
    levels = drafted_levels(trace, middle, setting.latency, tp_degree, seed)
    return GatedHistory(setting.latency, tp_degree, levels)


def _simulate_maximum(
    setting: Setting,
    overlap: Overlap,
    seed: int,
    drafting: GatedHistory,
    progress: Callable[[str], None],
) -> Iterator[PipelineRow]:
    maximum, cluster = setting.spec.max_response_tokens, (setting.layout, setting.latency)
    # AReaL has no last step, so it gets more of them.
    steps = (*overlap.steps, *overlap.more_steps)
    trace = setting.trace(seed, steps, num_epochs=2)
    script, longer = read_script(trace, overlap.steps), read_script(trace, steps)
    alone = simulate_pipeline(script, *cluster, on_policy(), sync_s=overlap.sync_s)
    train_s = alone.step_s * overlap.train_share / (1.0 - overlap.train_share)
    times = {"train_s": train_s, "sync_s": overlap.sync_s}
    rates: dict[str, float] = {}
    for variant in variants(*cluster, overlap.num_groups, drafting, train_s):
        progress(f"{maximum // K}K, {variant.name}")
        way = variant.configuration
        if isinstance(way, Asynchronous):
            measured = measured_steps(script)
            result = simulate_asynchronous(longer, *cluster, way, measured=measured, **times)
        else:
            of = as_groups(script) if variant.hindsight else script
            result = simulate_pipeline(of, *cluster, way, **times)
        rates[variant.name] = result.samples_per_s
        speedup = rates[variant.name] / rates[variant.over or variant.name]
        total = rates[variant.name] / rates[BASELINE]
        yield PipelineRow(variant, maximum, result, speedup, total)


def variants(
    cluster: ClusterLayout,
    latency: Latency,
    num_groups: int,
    drafting: GatedHistory,
    train_s: float = 0.0,
) -> list[PipelineVariant]:
    """Return the baseline, the systems beside RhymeRL, and its parts."""
    return [
        *_systems(drafting),
        *_queues(cluster, latency, drafting, train_s),
        *_parts(cluster, latency, num_groups, drafting),
    ]


def on_policy(*, apart: bool = False) -> Configuration:
    """Return veRL's on-policy mode: the next step begins when this one is trained."""
    return Configuration(name="veRL, on-policy", plan=dealt, barrier=True, staleness=0, apart=apart)


def _systems(drafting: GatedHistory) -> Iterator[PipelineVariant]:
    """Yield the baseline first. RhymeRL's idle shares are of prompts dealt whole, not apart."""
    baseline = Configuration(name=BASELINE, plan=dealt, barrier=True)
    yield PipelineVariant(baseline, system="one_step_off")
    yield PipelineVariant(on_policy(), BASELINE, system="on_policy")
    apart = replace(baseline, name=f"{BASELINE}, samples apart", apart=True)
    yield PipelineVariant(apart, BASELINE, system="one_step_off_apart")
    for eta in STALENESS:
        way = Asynchronous(name=f"AReaL, {eta} stale", staleness=eta)
        yield PipelineVariant(way, BASELINE, system=f"areal_{eta}")
    plain = Configuration(name="overlapping", plan=dealt)
    yield PipelineVariant(plain, BASELINE, system="overlapping")
    drafted = replace(plain, name="overlapping, drafting", drafting=drafting)
    yield PipelineVariant(drafted, BASELINE, system="overlapping_drafting")
    for eta in KEPT:
        kept = Asynchronous(name=f"AReaL, {eta} stale, kept", staleness=eta, keeps_bound=True)
        yield PipelineVariant(kept, BASELINE, system=f"areal_{eta}_kept")


def _queues(
    cluster: ClusterLayout, latency: Latency, drafting: GatedHistory, train_s: float
) -> Iterator[PipelineVariant]:
    """Yield the queue with each staleness."""
    of = partial(queued, plan=dealt, cluster=cluster, latency=latency, train_s=train_s)
    for staleness, system in enumerate(("queue_0", "queue_total", "queue_2")):
        closes = OVERSAMPLE if staleness else None
        way = of(
            f"queue, {staleness} stale", staleness=staleness, drafting=drafting, oversample=closes
        )
        yield PipelineVariant(way, BASELINE, system=system)
    known = of(
        "queue, 1 stale, in hindsight",
        staleness=1,
        drafting=drafting,
        oversample=OVERSAMPLE,
        lengths=KnownLengths,
    )
    yield PipelineVariant(known, BASELINE, system="queue_hindsight", hindsight=True)
    plain = of("queue, 2 stale, no drafts", staleness=2, in_flight=True, oversample=OVERSAMPLE)
    yield PipelineVariant(plain, BASELINE, system="queue_2_plain")


def _parts(
    cluster: ClusterLayout, latency: Latency, num_groups: int, drafting: GatedHistory
) -> Iterator[PipelineVariant]:
    config, over = HistoPipeConfig(), BASELINE
    run = run_config(16 * K, staleness=1, histopipe=config, rollout={"placement": "histopipe"})
    times = (None, two_tier(cluster, latency), two_tier(cluster, TokenLatency(drafting)))
    for part, rollout_time, drafts in zip(PARTS, times, (None, None, drafting), strict=True):
        configuration = Configuration(
            name=part,
            plan=in_turn(config, rollout_time, num_groups),
            policies=partial(migrating, run),
            report_s=REPORT_S,
            drafting=drafts,
            oversample=OVERSAMPLE,
        )
        yield PipelineVariant(configuration, over, part)
        over = part


def two_tier(cluster: ClusterLayout, latency: Latency) -> RolloutTime:
    """Return the estimate of a ranking group's time, by which it gets its engines."""
    return partial(
        estimate_rollout_s, latency, cluster.tp_degree, max_num_seqs=cluster.max_num_seqs
    )


def _plan(
    step: StepScript,
    groups: Sequence[PromptGroup],
    ranking_groups: Sequence[RankingGroup] = (),
    min_growth: float = 1.1,
) -> StepPlan:
    return step_plan(
        step.step,
        groups,
        step.group_size,
        epoch=step.epoch,
        policy_version=max(0, step.step - 2),
        ranking_groups=tuple(ranking_groups),
        length_growth=length_growth(step.history, min_growth),
    )
