"""RhymeRL's ablation (section 7.2.1, Fig. 14) in its setting: what each of its parts brings.

    baseline       veRL disaggregated: prompts dealt round-robin, a barrier after every step
    alternation    ranking groups ascending and descending in turn (6.2), outliers moved (6.3)
    two-tier       engines of each ranking group by its expected time (6.4)
    HistoSpec      drafting from history (5)

Its migration belongs to its pipeline, so alternation is with it. Beside these stands what nobody
printed: the same overlap, or the same drafting, with prompts dealt round-robin or by longest
processing time first (LPT), the latter also from both ends in turn, and alternation without
migration.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product

from benchmarks.papers.generate import K
from benchmarks.papers.pipeline import Configuration, Planner, simulate_pipeline
from benchmarks.papers.real_run import asked_seldom, run_config, step_plan
from benchmarks.papers.script import StepScript, read_script
from benchmarks.papers.settings import Overlap, Setting
from benchmarks.papers.windows import TYPICAL, GatedAimd, TokenLatency
from engines.control.techniques import StepFacts, plan_policies
from engines.histopipe.estimate import estimate_rollout_s
from engines.histopipe.passes import fit_passes
from engines.histopipe.placement import RolloutTime, plan_placement
from engines.histopipe.ranking import length_growth
from engines.latency.interface import Latency
from engines.rollout.moves import Policy
from engines.simulate.cluster import PLACEMENTS
from schemas.config import HistoPipeConfig, TrainConfig
from schemas.simulate import ClusterLayout, SimulatedPipeline
from schemas.step import PromptGroup, RankingGroup, StepPlan

BASELINE = "baseline"
PARTS = ("alternation", "two-tier", "HistoSpec")
"""Parts of RhymeRL, each upon those before it."""
REPORT_S = 5.0
"""How often virtual engines tell how long their responses are: some 150 tokens each."""


@dataclass(frozen=True, slots=True)
class PipelineVariant:
    """A configuration, and what it is compared with."""

    configuration: Configuration
    over: str | None = None
    """Name of the one that its speed-up is over; None: it is the baseline."""
    part: str | None = None
    """Part of the paper's that it adds, if one."""
    num_groups: int | None = None


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
    policies = plan_policies(config, StepFacts(plan=plan))
    return asked_seldom(policies, REPORT_S / 2)


def simulate_ablation(
    setting: Setting, overlap: Overlap, seed: int, progress: Callable[[str], None]
) -> list[PipelineRow]:
    """Every variant in every case; `progress` is told the name of each."""
    cases = product(overlap.prompts_per_step, overlap.maxima)
    return [row for case in cases for row in _simulate_case(setting, overlap, seed, case, progress)]


def _simulate_case(
    setting: Setting,
    overlap: Overlap,
    seed: int,
    case: tuple[int, int],
    progress: Callable[[str], None],
) -> Iterator[PipelineRow]:
    prompts_per_step, maximum = case
    changes = {"max_response_tokens": maximum, "prompts_per_step": prompts_per_step}
    of_case = replace(setting, spec=setting.spec.model_copy(update=changes))
    script = read_script(of_case.trace(seed, overlap.steps, num_epochs=2), overlap.steps)
    rates: dict[str, float] = {}
    # With another number of prompts, the first number of groups will do.
    own = prompts_per_step == overlap.prompts_per_step[0]
    num_groups = overlap.num_groups if own else overlap.num_groups[:1]
    for variant in variants(setting.layout, setting.latency, num_groups):
        name = variant.configuration.name
        progress(f"{prompts_per_step} prompts, {maximum // 1024}K, {name}")
        result = simulate_pipeline(
            script,
            setting.layout,
            setting.latency,
            variant.configuration,
            train_s=overlap.train_s,
            sync_s=overlap.sync_s,
        )
        rates[name] = result.samples_per_s
        speedup = rates[name] / rates[variant.over or name]
        total = rates[name] / rates[BASELINE]
        yield PipelineRow(variant, prompts_per_step, maximum, result, speedup, total)


def variants(
    cluster: ClusterLayout, latency: Latency, num_groups: Sequence[int]
) -> list[PipelineVariant]:
    """The baseline, the paper's parts one upon the other, and what stands beside them."""
    drafting = GatedAimd(latency, cluster.tp_degree, TYPICAL)
    baseline = Configuration(name=BASELINE, plan=dealt("even"), barrier=True)
    parts = chain(*(_parts(cluster, latency, num, drafting) for num in num_groups))
    return [PipelineVariant(baseline), *parts, *_beside(num_groups[0], drafting)]


def _parts(
    cluster: ClusterLayout, latency: Latency, num: int, drafting: GatedAimd
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


def _beside(num: int, drafting: GatedAimd) -> Iterator[PipelineVariant]:
    """Variants that nobody printed."""
    still = in_turn(HistoPipeConfig(num_ranking_groups=num))
    name = f"alternation, nobody moved, {num} groups"
    yield PipelineVariant(Configuration(name=name, plan=still), BASELINE)
    lpt = dealt("ranked")
    yield PipelineVariant(Configuration(name="LPT", plan=lpt, barrier=True), BASELINE)
    for name, plan in (
        ("even, overlapping", dealt("even")),
        ("LPT, overlapping", lpt),
        ("LPT in turn, overlapping", dealt("ranked", mirrored=True)),
    ):
        yield PipelineVariant(Configuration(name=name, plan=plan), BASELINE)
        fast = Configuration(name=f"{name}, drafting", plan=plan, drafting=drafting)
        yield PipelineVariant(fast, name)


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
