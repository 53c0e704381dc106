"""Write a step's page for Prefect: the plan, the result, the effect of each technique. Pure."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from refrain.engines.accounting.savings import saving_words
from refrain.schemas.config import TrainConfig
from refrain.schemas.drafting import HISTORY
from refrain.schemas.step import RolloutBatch, StepPlan, StepReport
from refrain.schemas.timeline import Savings

PHASES = {
    "history": "looking up histories",
    "sync": "weight sync, canary included",
    "rollout": "rollout",
    "reward": "reward, after the rollouts",
    "train": "training",
    "step": "the whole step",
}
"""Words for the keys of `StepReport.timing_s`."""


def step_page(
    config: TrainConfig,
    plan: StepPlan,
    batch: RolloutBatch,
    report: StepReport,
    num_steps: int,
    record: str,
    savings: Savings | None = None,
) -> str:
    """Return the page as Markdown. `record`: sentence of `record_link` about MLflow's record."""
    timing_s = report.timing_s
    phases = [
        (words, f"{timing_s[name]:.2f}") for name, words in PHASES.items() if name in timing_s
    ]
    return "\n\n".join(
        (
            f"# Step {report.step} of {num_steps}, epoch {report.epoch + 1} of {config.num_epochs}",
            f"Reward **{report.reward_mean:.3f}**. {record}",
            "## Planned",
            _bullets(_planned(config, plan, batch)),
            *_ranking(plan),
            "## What happened",
            _bullets(_happened(batch)),
            _table(("phase", "seconds"), phases),
            "## What each technique did",
            _bullets(_techniques(config, plan, batch)),
            *_saved(savings),
            *_traces(config, report.step),
        )
    )


def record_link(page: str | None, runs_dir: str, experiment_id: str, run_id: str) -> str:
    """Return a sentence that links to the run in MLflow. `page`: address of the MLflow server, if
    known. Without an address, the sentence says which command shows the run."""
    if page and page.startswith("http"):
        # Otherwise MLflow shows its view for LLM applications.
        kind = "?workflowType=machine_learning"
        address = f"{page.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}{kind}"
        return f"[The run in MLflow]({address}): curves, and plans, rollouts, timelines of steps."
    return (
        f"The run in MLflow is `{run_id}`: `refrain ui --runs-dir {runs_dir}` shows it, at "
        "http://127.0.0.1:5000."
    )


def _traces(config: TrainConfig, step: int) -> Iterable[str]:
    trace = config.trainer.trace(config.run_dir)
    if trace and trace.step == step:
        yield (
            f"Profiler traces of trainer and engines: [{trace.directory}]"
            f"({trace.directory.as_uri()}). Open them in https://ui.perfetto.dev."
        )


def _planned(config: TrainConfig, plan: StepPlan, batch: RolloutBatch) -> Iterable[str]:
    rollout = config.rollout
    yield (
        f"{len(plan.groups):,} prompts x {plan.group_size} samples, with policy version "
        f"{plan.policy_version}"
    )
    if plan.num_refills:
        yield f"{plan.num_refills} of them drawn to replace prompts that teach nothing"
    there = sum(share.engine < rollout.num_engines for share in batch.shares)
    yield f"{there} engines of TP {rollout.tp_degree}, `staleness: {config.staleness}`"
    yield f"drafts: {_drafter(config, plan)}"
    expected = [g.expected_tokens for g in plan.groups if g.expected_tokens is not None]
    if expected:
        passes = [g.expected_passes for g in plan.groups if g.expected_passes is not None]
        in_passes = f" in {fmean(passes):,.0f} passes" if passes else ""
        yield (
            f"expected: {fmean(expected):,.0f} tokens a response{in_passes}, from "
            f"{len(expected):,} known prompts"
        )
    if plan.expected_s is not None and plan.equal_s is not None:
        ends = f"engines are expected to end after {plan.expected_s:,.1f} s"
        sooner = plan.expected_s < plan.equal_s
        yield f"{ends}, with equal passes after {plan.equal_s:,.1f} s" if sooner else ends
    if carried := batch.num_rollouts + batch.moves.num_deferred - plan.num_planned:
        yield f"{carried} samples deferred from the previous step"


def _drafter(config: TrainConfig, plan: StepPlan) -> str:
    if plan.drafting:
        coupling = "in turn" if plan.drafting.coupled else "ahead"
        return f"by `{plan.drafting.drafter}`, window {plan.drafting.window}, {coupling}"
    return f"from history (`{HISTORY}`)" if config.drafting.enabled else "none"


def _ranking(plan: StepPlan) -> Iterable[str]:
    if plan.ranking_groups:
        rows = [
            (
                str(i),
                ", ".join(map(str, group.engines)),
                f"{group.num_prompts:,}",
                f"{group.representative_tokens:,.0f}",
                ""
                if group.representative_passes is None
                else f"{group.representative_passes:,.0f}",
                f"{group.longest_tokens:,}",
            )
            for i, group in enumerate(plan.ranking_groups)
        ]
        columns = ("ranking group", "engines", "prompts", "expected tokens", "in passes")
        yield _table((*columns, "longest so far"), rows)


def _happened(batch: RolloutBatch) -> Iterable[str]:
    speed = batch.num_tokens / batch.generation_s if batch.generation_s else 0.0
    yield f"{batch.num_rollouts:,} rollouts, {batch.num_tokens:,} tokens, {speed:,.0f} tokens/s"
    yield (
        f"{batch.mean_response_tokens:,.1f} tokens each, the longest "
        f"{batch.max_response_tokens:,}; {batch.clip_ratio:.1%} were cut"
    )
    yield (
        f"engines were idle for {batch.idle_share:.0%} of the rollout, "
        f"{batch.bubble_share:.0%} of the time since the one before"
    )
    if batch.canary_error is not None:
        yield f"canary: engines and trainer differ by {batch.canary_error:.2g} nats a token"
    restarts = sum(share.num_restarts for share in batch.shares)
    if restarts:
        yield f"**{restarts} engine restarts**"
    if gone := [str(share.engine) for share in batch.shares if share.gone]:
        yield f"**gone with a node: engine {', '.join(gone)}**"


def _techniques(config: TrainConfig, plan: StepPlan, batch: RolloutBatch) -> Iterable[str]:
    yield _drafting(batch)
    moves = batch.moves
    if plan.ranking_groups:
        yield (
            f"HistoPipe: {moves.num_migrated} requests migrated, {moves.num_deferred} deferred to "
            "the next step"
        )
    if config.specactor.draft_models:
        yield (
            f"racing: {moves.num_raced} copies started ({moves.num_raced_with_kv} with keys and "
            f"values), {moves.num_races_won} finished first, "
            f"{moves.wasted_tokens:,} tokens of losing copies"
        )
    if config.pat.tp_degrees:
        yield f"TP: {moves.num_switches} switches"
    for drafter, counts in batch.drafted.items():
        if counts.num_drafted:
            yield (
                f"`{drafter}`: {counts.num_drafted:,} tokens drafted, "
                f"{counts.num_wasted / counts.num_drafted:.0%} thrown away"
            )


def _saved(savings: Savings | None) -> Iterable[str]:
    if savings:
        yield "## What each technique saved"
        yield _bullets(saving_words(savings))
    if savings and savings.each:
        yield (
            f"Predicted without it by {savings.source}, minus measured; ± the error of the same "
            "prediction for the measured step. The timeline in MLflow (`timelines/`) shows the "
            "step."
        )


def _drafting(batch: RolloutBatch) -> str:
    if not batch.num_draft_tokens:
        return "drafting: nothing was drafted"
    tokens_per_pass, _ = batch.speculation
    busy_s = sum(share.busy_s for share in batch.shares)
    took = sum(share.drafting.draft_s for share in batch.shares) / busy_s if busy_s else 0.0
    return (
        f"drafting: {batch.num_accepted_tokens:,} of {batch.num_tokens:,} forward passes saved "
        f"({tokens_per_pass:.2f} tokens a pass), "
        f"{batch.num_accepted_tokens / batch.num_draft_tokens:.0%} of drafts accepted; drafting "
        f"took {took:.1%} of the engines' time"
    )


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    ruler = ["---"] * len(columns)
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ruler, *rows))
