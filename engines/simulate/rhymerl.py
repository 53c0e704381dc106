"""RhymeRL's ablation (section 7.2.1, Fig. 14) in its setting: what each of its parts brings.

    baseline         veRL disaggregated: prompts dealt round-robin, a barrier after every step
    alternation      ranking groups ascending and descending in turn (6.2), outliers moved (6.3)
    two-tier         engines of each ranking group by its expected time (6.4)
    + HistoSpec      drafting from history (5)

Its migration belongs to its pipeline, so alternation is with it. Beside these stands what nobody
printed: the same overlap, or the same drafting, with prompts dealt by longest processing time first
instead, and alternation without migration.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from engines.histopipe.estimate import estimate_rollout_s
from engines.histopipe.migration import Migration
from engines.histopipe.placement import RolloutTime, plan_placement
from engines.histopipe.ranking import length_growth
from engines.latency.interface import Latency
from engines.rollout.moves import Policy
from engines.simulate.cluster import PLACEMENTS
from engines.simulate.member import HISTOSPEC
from engines.simulate.pipeline import Configuration, Planner
from engines.simulate.script import StepScript
from engines.simulate.windows import BestWindow, TokenLatency
from schemas.config import HistoPipeConfig
from schemas.rollout import Split
from schemas.simulate import ClusterLayout
from schemas.step import PromptGroup, RankingGroup, StepPlan

ACCEPTANCE = 0.72
"""Assumed: the middle of the 65 to 79 % of drafted tokens that are accepted (7.2.2), taken as the
probability of each, so that of whole windows less is accepted than printed. That every step has
something to draft is assumed as well (5.1 finds 93 % of the tokens by a match of three)."""
REPORT_S = 2.0
"""How often virtual engines tell how long their responses are."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A configuration, and what it is compared with."""

    configuration: Configuration
    over: str | None
    """Name of the one that its speed-up is over; None: it is the baseline."""


def dealt(name: str) -> Planner:
    """`even` or `ranked`, as in `engines.simulate.cluster`."""

    def plan(step: StepScript, num_engines: int) -> StepPlan:
        medians = {key: lengths.median_tokens for key, lengths in step.history.items()}
        return _plan(step, PLACEMENTS[name](list(step.requests), medians, num_engines))

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
        )
        return _plan(step, placement.groups, placement.ranking_groups, config.min_growth)

    return plan


def moving(config: HistoPipeConfig, plan: StepPlan) -> Sequence[Policy]:
    """Its migration (6.3)."""
    return (Migration(plan, last_share=config.last_share, defer_share=config.defer_share),)


def ablation(
    cluster: ClusterLayout, latency: Latency, config: HistoPipeConfig, acceptance: float
) -> list[Variant]:
    """The paper's parts one upon the other, then the same with longest processing time first."""
    groups = f" {config.num_ranking_groups}"
    token_s = TokenLatency(BestWindow(latency, cluster.tp_degree, HISTOSPEC, acceptance))
    pipe = partial(_pipe, config)
    two_tier = in_turn(config, _rollout_time(cluster, latency))
    two_tier_drafting = in_turn(config, _rollout_time(cluster, token_s))
    return [
        Variant(Configuration(name="baseline", plan=dealt("even"), barrier=True), None),
        Variant(pipe(name="alternation" + groups, plan=in_turn(config)), "baseline"),
        Variant(pipe(name="two-tier" + groups, plan=two_tier), "alternation" + groups),
        Variant(
            pipe(name="HistoSpec" + groups, plan=two_tier_drafting, acceptance=acceptance),
            "two-tier" + groups,
        ),
        Variant(
            Configuration(name="alternation, nobody moved" + groups, plan=in_turn(config)),
            "baseline",
        ),
        Variant(Configuration(name="even, overlapping", plan=dealt("even")), "baseline"),
        Variant(Configuration(name="LPT", plan=dealt("ranked"), barrier=True), "baseline"),
        Variant(Configuration(name="LPT, overlapping", plan=dealt("ranked")), "baseline"),
        Variant(
            Configuration(
                name="LPT, overlapping, HistoSpec", plan=dealt("ranked"), acceptance=acceptance
            ),
            "LPT, overlapping",
        ),
    ]


def _pipe(
    config: HistoPipeConfig, *, name: str, plan: Planner, acceptance: float | None = None
) -> Configuration:
    return Configuration(
        name=name,
        plan=plan,
        policies=partial(moving, config),
        report_s=REPORT_S,
        acceptance=acceptance,
        oversample=config.oversample,
    )


def _rollout_time(cluster: ClusterLayout, latency: Latency) -> RolloutTime:
    return partial(
        estimate_rollout_s, latency, cluster.tp_degree, max_num_seqs=cluster.max_num_seqs
    )


def _plan(
    step: StepScript,
    groups: Sequence[PromptGroup],
    ranking_groups: Sequence[RankingGroup] = (),
    min_growth: float = 1.1,
) -> StepPlan:
    return StepPlan(
        split=Split.TRAIN,
        step=step.step,
        epoch=step.epoch,
        policy_version=max(0, step.step - 2),
        created_s=0.0,
        group_size=step.group_size,
        groups=tuple(groups),
        ranking_groups=tuple(ranking_groups),
        length_growth=length_growth(step.history, min_growth),
    )
