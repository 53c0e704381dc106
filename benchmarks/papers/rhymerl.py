"""RhymeRL's evaluation (section 7) in its setting: what each of its parts brings, and what the
systems do that it is compared with (7.1; AReaL is in `benchmarks.papers.areal`).

    baseline       veRL disaggregated, one step off: prompts dealt round-robin, a barrier after
                   every step
    alternation    ranking groups ascending and descending in turn (6.2), outliers moved (6.3)
    two-tier       engines of each ranking group by its expected time (6.4)
    HistoSpec      drafting from history (5), as a run does (`benchmarks.papers.history_drafting`)

Its migration belongs to its pipeline, so alternation is with it. Beside these stands what nobody
printed: the same overlap, or the same drafting, with prompts dealt round-robin, their samples
together or apart, or by longest processing time first (LPT), the latter also from both ends in
turn, and alternation without migration.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product

from benchmarks.papers.areal import Asynchronous, measured_steps, simulate_asynchronous
from benchmarks.papers.generate import K
from benchmarks.papers.history_drafting import drafted_levels
from benchmarks.papers.pipeline import Configuration, Planner, simulate_pipeline
from benchmarks.papers.real_run import asked_seldom, step_plan
from benchmarks.papers.script import Script, StepScript, read_script
from benchmarks.papers.settings import Overlap, Setting
from benchmarks.papers.windows import GatedHistory, TokenLatency
from engines.control.techniques import StepInputs, plan_policies
from engines.histopipe.estimate import estimate_rollout_s
from engines.histopipe.passes import fit_passes
from engines.histopipe.placement import RolloutTime, plan_placement
from engines.histopipe.ranking import length_growth
from engines.latency.interface import Latency
from engines.rollout.moves import Policy
from engines.simulate.cluster import PLACEMENTS
from engines.simulate.run_config import run_config
from schemas.config import HistoPipeConfig, TrainConfig
from schemas.simulate import ClusterLayout, SimulatedPipeline
from schemas.step import PromptGroup, RankingGroup, StepPlan

BASELINE = "veRL, one step off"
PARTS = ("alternation", "two-tier", "HistoSpec")
"""Parts of RhymeRL, each upon those before it."""
EQUAL = 1
"""AReaL's eta that makes it as stale as RhymeRL (7.1)."""
STALENESS = (EQUAL, 4, 8)
"""AReaL's eta: 1 and 8 are those of 7.1, 4 is of AReaL's own evaluation."""
REPORT_S = 5.0
"""How often virtual engines tell how long their responses are: some 150 tokens each."""


@dataclass(frozen=True, slots=True)
class PipelineVariant:
    """A configuration, and what it is compared with."""

    configuration: Configuration | Asynchronous
    over: str | None = None
    """Name of the one that its speed-up is over; None: it is the baseline."""
    part: str | None = None
    """Part of the paper's that it adds, if one."""
    num_groups: int | None = None
    system: str | None = None
    """Name among the figures, of a system that the paper is compared with."""

    @property
    def name(self) -> str:
        return self.configuration.name

    @property
    def aside(self) -> bool:
        """Whether nobody printed it."""
        return self.over is not None and self.part is None and self.system is None

    @property
    def drafting(self) -> GatedHistory | None:
        configuration = self.configuration
        return configuration.drafting if isinstance(configuration, Configuration) else None


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """A variant, simulated."""

    variant: PipelineVariant
    prompts_per_step: int
    max_response_tokens: int
    result: SimulatedPipeline
    speedup: float
    """Speed-up in samples per second, over the variant named."""
    total_speedup: float
    """Over the baseline."""

    @property
    def case(self) -> str:
        return f"{self.prompts_per_step} prompts, {self.max_response_tokens // K}K"


def dealt(name: str, *, mirrored: bool = False) -> Planner:
    """`even` or `ranked`, as in `engines.simulate.cluster`. `mirrored`: from the last engine on at
    even steps, so that the engine with the longest prompt of one step has a short one in the next.
    """

    def plan(step: StepScript, num_engines: int) -> StepPlan:
        medians = {key: lengths.median_tokens for key, lengths in step.history.items()}
        groups = PLACEMENTS[name](list(step.requests), medians, num_engines)
        if mirrored and step.step % 2 == 0:
            last = num_engines - 1
            groups = [g.model_copy(update={"engine": last - g.engine}) for g in groups]
        return _plan(step, groups)

    return plan


def in_turn(config: HistoPipeConfig, rollout_time: RolloutTime | None = None) -> Planner:
    """HistoPipe's placement; two-tier with `rollout_time`."""

    def plan(step: StepScript, num_engines: int) -> StepPlan:
        placement = plan_placement(
            config,
            list(step.requests),
            step.history,
            step.step,
            num_engines,
            step.group_size,
            rollout_time,
            fit_passes(step.history),
        )
        return _plan(step, placement.groups, placement.ranking_groups, config.min_growth)

    return plan


def migrating(config: TrainConfig, plan: StepPlan) -> Sequence[Policy]:
    """A real run's policies without a latency model: its migration (6.3)."""
    policies = plan_policies(config, StepInputs(plan=plan))
    return asked_seldom(policies, REPORT_S / 2)


def simulate_ablation(
    setting: Setting, overlap: Overlap, seed: int, progress: Callable[[str], None]
) -> list[PipelineRow]:
    """Every variant in every case; `progress` is told the name of each."""
    progress("what the drafter brings")
    drafting = _drafting(setting, overlap, seed)
    cases = product(overlap.prompts_per_step, overlap.maxima)
    return [
        row
        for case in cases
        for row in _simulate_case(setting, overlap, seed, case, drafting, progress)
    ]


def _drafting(setting: Setting, overlap: Overlap, seed: int) -> GatedHistory:
    """Drafting of a run in the middle of these steps: the same for all cases."""
    middle, tp_degree = overlap.steps[len(overlap.steps) // 2], setting.layout.tp_degree
    trace = setting.trace(seed, (middle,))
    levels = drafted_levels(trace, middle, setting.latency, tp_degree, seed)
    return GatedHistory(setting.latency, tp_degree, levels)


def _simulate_case(
    setting: Setting,
    overlap: Overlap,
    seed: int,
    case: tuple[int, int],
    drafting: GatedHistory,
    progress: Callable[[str], None],
) -> Iterator[PipelineRow]:
    prompts_per_step, maximum = case
    changes = {"max_response_tokens": maximum, "prompts_per_step": prompts_per_step}
    of_case = replace(setting, spec=setting.spec.model_copy(update=changes))
    scene = _read_scene(of_case, overlap, seed)
    rates: dict[str, float] = {}
    # With another number of prompts, the first number of groups will do, and what is printed.
    own = prompts_per_step == overlap.prompts_per_step[0]
    num_groups = overlap.num_groups if own else overlap.num_groups[:1]
    found = variants(setting.layout, setting.latency, num_groups, drafting)
    for variant in found if own else (one for one in found if not one.aside):
        progress(f"{prompts_per_step} prompts, {maximum // K}K, {variant.name}")
        result = _simulate(scene, variant)
        rates[variant.name] = result.samples_per_s
        speedup = rates[variant.name] / rates[variant.over or variant.name]
        total = rates[variant.name] / rates[BASELINE]
        yield PipelineRow(variant, prompts_per_step, maximum, result, speedup, total)


@dataclass(frozen=True, slots=True)
class _Scene:
    """One case, read."""

    layout: ClusterLayout
    latency: Latency
    script: Script
    longer: Script
    """The same and more steps, for who has no last one."""
    train_s: float
    sync_s: float


def _read_scene(setting: Setting, overlap: Overlap, seed: int) -> _Scene:
    layout, latency = setting.layout, setting.latency
    steps = (*overlap.steps, *overlap.more_steps)
    trace = setting.trace(seed, steps, num_epochs=2)
    script, longer = read_script(trace, overlap.steps), read_script(trace, steps)
    alone = simulate_pipeline(script, layout, latency, on_policy(), sync_s=overlap.sync_s)
    return _Scene(
        layout=layout,
        latency=latency,
        script=script,
        longer=longer,
        train_s=alone.step_s * overlap.train_share / (1.0 - overlap.train_share),
        sync_s=overlap.sync_s,
    )


def _simulate(scene: _Scene, variant: PipelineVariant) -> SimulatedPipeline:
    times = {"train_s": scene.train_s, "sync_s": scene.sync_s}
    cluster, configuration = (scene.layout, scene.latency), variant.configuration
    if isinstance(configuration, Asynchronous):
        measured = measured_steps(scene.script)
        return simulate_asynchronous(
            scene.longer, *cluster, configuration, measured=measured, **times
        )
    return simulate_pipeline(scene.script, *cluster, configuration, **times)


def variants(
    cluster: ClusterLayout,
    latency: Latency,
    num_groups: Sequence[int],
    drafting: GatedHistory,
) -> list[PipelineVariant]:
    """The baseline, the systems that the paper is compared with, its parts one upon the other, and
    what stands beside them."""
    baseline = Configuration(name=BASELINE, plan=dealt("even"), barrier=True)
    parts = chain(*(_parts(cluster, latency, num, drafting) for num in num_groups))
    return [
        PipelineVariant(baseline, system="one_step_off"),
        *_systems(),
        *parts,
        *_beside(num_groups[0], drafting),
    ]


def on_policy(*, apart: bool = False) -> Configuration:
    """veRL's, too: the next step begins when this one is trained."""
    name = "veRL, on-policy, samples apart" if apart else "veRL, on-policy"
    return Configuration(name=name, plan=dealt("even"), barrier=True, lag=1, apart=apart)


def _systems() -> Iterator[PipelineVariant]:
    """The others of the paper's comparison (7.1). `apart`: every sample on the next engine, where
    the paper's idle shares are those of prompts dealt whole."""
    apart = Configuration(
        name=f"{BASELINE}, samples apart", plan=dealt("even"), barrier=True, apart=True
    )
    yield PipelineVariant(on_policy(), BASELINE, system="on_policy")
    yield PipelineVariant(on_policy(apart=True), BASELINE, system="on_policy_apart")
    yield PipelineVariant(apart, BASELINE, system="one_step_off_apart")
    for eta in STALENESS:
        way = Asynchronous(name=f"AReaL, {eta} stale", staleness=eta)
        yield PipelineVariant(way, BASELINE, system=f"areal_{eta}")
    kept = Asynchronous(name=f"AReaL, {EQUAL} stale, kept", staleness=EQUAL, keeps_bound=True)
    yield PipelineVariant(kept, BASELINE, system=f"areal_{EQUAL}_kept")


def _parts(
    cluster: ClusterLayout, latency: Latency, num: int, drafting: GatedHistory
) -> Iterator[PipelineVariant]:
    config, over = HistoPipeConfig(num_ranking_groups=num), BASELINE
    times = (None, two_tier(cluster, latency), two_tier(cluster, TokenLatency(drafting)))
    for part, rollout_time, drafts in zip(PARTS, times, (None, None, drafting), strict=True):
        configuration = Configuration(
            name=f"{part}, {num} groups",
            plan=in_turn(config, rollout_time),
            policies=partial(migrating, run_config(16 * K, mode="pipelined", histopipe=config)),
            report_s=REPORT_S,
            drafting=drafts,
            oversample=config.oversample,
        )
        yield PipelineVariant(configuration, over, part, num)
        over = configuration.name


def _beside(num: int, drafting: GatedHistory) -> Iterator[PipelineVariant]:
    """Variants that nobody printed."""
    still = in_turn(HistoPipeConfig(num_ranking_groups=num))
    name = f"alternation, nobody moved, {num} groups"
    yield PipelineVariant(Configuration(name=name, plan=still), BASELINE)
    lpt = dealt("ranked")
    yield PipelineVariant(Configuration(name="LPT", plan=lpt, barrier=True), BASELINE)
    for name, plan, apart in (
        ("even, overlapping", dealt("even"), False),
        ("samples apart, overlapping", dealt("even"), True),
        ("LPT, overlapping", lpt, False),
        ("LPT in turn, overlapping", dealt("ranked", mirrored=True), False),
    ):
        plain = Configuration(name=name, plan=plan, apart=apart)
        yield PipelineVariant(plain, BASELINE)
        yield PipelineVariant(replace(plain, name=f"{name}, drafting", drafting=drafting), name)


def two_tier(cluster: ClusterLayout, latency: Latency) -> RolloutTime:
    """Expected time of a ranking group, by which it gets its engines."""
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
