"""Metrics of a step, under the names that veRL users plot, and of an evaluation. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa

from refrain.engines.accounting.conversations import conversation_metrics
from refrain.engines.accounting.names import tracked_name
from refrain.engines.reward import sample_figures
from refrain.engines.reward.scorer import ERROR, NUM_RETRIES
from refrain.engines.rollout.stage import Outcome
from refrain.schemas.config import TrainConfig
from refrain.schemas.counts import StreamCounts, SwitchCounts
from refrain.schemas.evaluation import EvaluationReport, SourceFigures
from refrain.schemas.rollout import OVERLONG, FinishReason
from refrain.schemas.step import (
    EngineShare,
    HistoryReport,
    RewardedBatch,
    RolloutBatch,
    RunSummary,
    StepPlan,
    StepReport,
    TrainReport,
)
from refrain.schemas.timeline import Timeline

_SUMMED_COLUMNS = ("num_draft_tokens", "num_accepted_tokens", "num_verifications")
SUMMARISED_COLUMNS = ("response_tokens", "finish_reason", "turns", *_SUMMED_COLUMNS)
"""Columns of `Store.rollouts` that `summarise_rollouts` reads."""
BY_CHANCE = 0.01
"""If all prompts of an engine lack an index with less than this probability, it is no chance."""
MAX_PARTS = 200
"""Most numbers beside the score that become metrics. The most common ones are kept."""
LARGEST_PART = 1e300
"""Largest of these numbers, so that a sum of them stays finite."""
_OWN_PARTS = ("score", "rewards", "advantages")
"""Names for which a step has `critic/NAME/mean` anyway."""
_VERL_PHASES = {"rollout": "gen"}
"""veRL's names of the phases that it has too. Other phases keep our names."""


def summarise_rollouts(
    plan: StepPlan,
    rows: pa.Table,
    outcome: Outcome,
    timeline: Timeline,
    drafted: Mapping[str, StreamCounts] | None = None,
    before: SwitchCounts | None = None,
) -> RolloutBatch:
    """Summarise a rollout phase. `rows`: its durable rows (`Store.rollouts`). `timeline`: since the
    last phase ended."""
    generation = replace(timeline, start_s=max(timeline.start_s, outcome.started_s))
    lengths = rows["response_tokens"].to_numpy()
    reasons = rows["finish_reason"].to_pylist()
    return RolloutBatch(
        split=plan.split,
        step=plan.step,
        policy_version=plan.policy_version,
        num_rollouts=rows.num_rows,
        num_refills=plan.num_refills,
        num_tokens=int(lengths.sum()),
        mean_response_tokens=float(lengths.mean()),
        max_response_tokens=int(lengths.max()),
        clip_ratio=float(np.mean([reason in OVERLONG for reason in reasons])),
        num_failed=reasons.count(FinishReason.FAILED),
        **{name: int(rows[name].to_numpy().sum()) for name in _SUMMED_COLUMNS},
        moves=outcome.moves,
        switches=(before or SwitchCounts()) + outcome.switches,
        drafted=dict(drafted or {}),
        generation_s=generation.end_s - generation.start_s,
        bubble_share=timeline.bubble_share,
        sync_s=outcome.sync_s,
        canary_error=outcome.canary_error,
        shares=tuple(_share(share, generation) for share in outcome.shares),
        conversations=conversation_metrics(rows, generation.end_s - generation.start_s),
    )


def _share(share: EngineShare, generation: Timeline) -> EngineShare:
    """Add the engine's idle time to its share. Drop `learnt`, which only engines need."""
    idle_s, drafting = generation.idle_s(share.engine), replace(share.drafting, learnt="")
    return share.model_copy(update={"idle_s": idle_s, "drafting": drafting})


def summarise_rewards(batch: RolloutBatch, rewards: pa.Table, reward_s: float) -> RewardedBatch:
    """Summarise a phase's rewards. `rewards`: its durable rows (`Store.rewards`)."""
    values = rewards["reward"].to_numpy() if rewards.num_rows else np.zeros(1)
    best = rewards.group_by("prompt_key").aggregate([("reward", "max")])["reward_max"].to_numpy()
    extras = [json.loads(extra) for extra in rewards["extra"].to_pylist()]
    return RewardedBatch(
        split=batch.split,
        step=batch.step,
        num_rollouts=rewards.num_rows,
        reward_mean=fmean(values.tolist()),
        reward_std=float(values.std()),
        reward_max=float(values.max()),
        reward_min=float(values.min()),
        best_of_group=float(best.mean()) if len(best) else 0.0,
        parts=_parts(extras),
        num_retried=sum(NUM_RETRIES in extra for extra in extras),
        num_unscored=sum(ERROR in extra for extra in extras),
        reward_s=reward_s,
    )


def _parts(extras: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for extra in extras:
        for name, value in extra.items():
            # Keep numbers only. JSON's `true` counts as 1, and NaN does not count.
            is_number = isinstance(value, int | float) and abs(value) <= LARGEST_PART
            if is_number and name != NUM_RETRIES:
                values.setdefault(name, []).append(float(value))
    common = sorted(values, key=lambda name: (-len(values[name]), name))[:MAX_PARTS]
    return {name: fmean(values[name]) for name in sorted(common)}


def step_report(
    history: HistoryReport,
    plan: StepPlan,
    batch: RolloutBatch,
    rewarded: RewardedBatch,
    trained: TrainReport,
    before: StepReport | None,
    reported_s: float,
    *,
    num_prompt_tokens: int,
    num_devices: int,
) -> StepReport:
    """Return the report of a finished step.

    The step began when it was planned or when the last step was reported, whichever was later.
    `reported_s`: Unix time. `num_prompt_tokens`: of all rollouts. `num_devices`: GPUs of the run,
    or processes on CPUs.
    """
    began_s = max(plan.created_s, before.reported_s if before else 0.0)
    timing_s = {
        "history": history.wait_s,
        "sync": batch.sync_s,
        "rollout": batch.generation_s,
        "reward": rewarded.reward_s,
        "train": trained.train_s,
        "step": reported_s - began_s,
    }
    return StepReport(
        step=plan.step,
        epoch=plan.epoch,
        reward_mean=rewarded.reward_mean,
        metrics=history_metrics(history)
        | {"history/num_blind_engines": float(len(blind_engines(history, plan, batch)))}
        | rollout_metrics(batch)
        | reward_metrics(rewarded)
        | trained.metrics
        | throughput_metrics(num_prompt_tokens + batch.num_tokens, timing_s["step"], num_devices)
        | {"training/epoch": float(plan.epoch)},
        timing_s=timing_s,
        reported_s=reported_s,
    )


def timing_metrics(timing_s: Mapping[str, float]) -> dict[str, float]:
    """Return `timing_s/PHASE`. A phase that veRL has too gets veRL's name, `timing_s/gen`."""
    return {f"timing_s/{_VERL_PHASES.get(name, name)}": s for name, s in timing_s.items()}


def throughput_metrics(num_tokens: int, step_s: float, num_devices: int) -> dict[str, float]:
    """Return veRL's throughput: prompt and response tokens per second of the step and device."""
    metrics = {"perf/total_num_tokens": float(num_tokens), "perf/time_per_step": step_s}
    if step_s > 0.0:
        metrics["perf/throughput"] = num_tokens / (step_s * num_devices)
    return metrics


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return lengths in tokens, and response tokens per second of generation. Busy time is summed
    over the engines: seconds in which they had requests of the phase."""
    metrics = {
        "response_length/mean": batch.mean_response_tokens,
        "response_length/max": float(batch.max_response_tokens),
        "response_length/clip_ratio": batch.clip_ratio,
        "rollout/idle_share": batch.idle_share,
        "rollout/bubble_share": batch.bubble_share,
        "rollout/busy_s": sum(share.busy_s for share in batch.shares),
        "rollout/num_restarts": float(sum(share.num_restarts for share in batch.shares)),
        "rollout/num_gone": float(sum(share.gone for share in batch.shares)),
        **{f"rollout/{name}": float(count) for name, count in asdict(batch.moves).items()},
        "rollout/num_failed": float(batch.num_failed),
        "rollout/num_refills": float(batch.num_refills),
        "rollout/staleness": float(batch.step - 1 - batch.policy_version),
    }
    if batch.generation_s > 0:
        metrics["rollout/tokens_per_s"] = batch.num_tokens / batch.generation_s
    metrics |= drafting_metrics(batch)
    if batch.canary_error is not None:
        metrics["rollout/canary_error"] = batch.canary_error
    return metrics | batch.conversations


def drafting_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return the drafting metrics, or nothing without drafting.

    Acceptance length: tokens per verification, the bonus token included. Speculation rate: share of
    all tokens that came from drafts. Draft share: of the engines' busy time. Gated share: of their
    steps. Drafts from other prompts' histories have their own acceptance rate.
    """
    metrics: dict[str, float] = {}
    num_steps = sum(share.drafting.num_steps for share in batch.shares)
    busy_s = sum(share.busy_s for share in batch.shares)
    if num_steps and busy_s:
        drafting = sum(share.drafting.num_drafting_steps for share in batch.shares)
        metrics["rollout/spec_gated_share"] = 1.0 - drafting / num_steps
        metrics["rollout/spec_draft_share"] = sum(s.drafting.draft_s for s in batch.shares) / busy_s
    if num_shared := sum(share.drafting.num_shared_draft_tokens for share in batch.shares):
        accepted = sum(share.drafting.num_shared_accepted_tokens for share in batch.shares)
        metrics["rollout/spec_shared_accept_rate"] = accepted / num_shared
    for drafter, counts in batch.drafted.items():
        if counts.num_drafted:
            name = f"drafter/{drafter}"
            metrics[f"{name}/wasted_share"] = counts.num_wasted / counts.num_drafted
            metrics[f"{name}/max_wasted"] = float(counts.max_wasted)
    if batch.num_draft_tokens:
        accepted = batch.num_accepted_tokens
        metrics["rollout/spec_accept_rate"] = accepted / batch.num_draft_tokens
        metrics["rollout/spec_accept_length"] = 1.0 + accepted / batch.num_verifications
        metrics["rollout/speculation_rate"] = accepted / batch.num_tokens
    return metrics


def history_metrics(history: HistoryReport) -> dict[str, float]:
    return {
        "history/num_indexed": float(history.num_indexed),
        "history/index_bytes": float(history.indexes.num_bytes),
        "history/num_damaged": float(history.indexes.num_damaged),
        "history/num_evicted": float(history.indexes.num_evicted),
        "history/num_restored": float(history.indexes.num_restored),
        "history/num_copied": float(history.indexes.num_copied),
        "history/wait_s": history.wait_s,
    }


def blind_engines(history: HistoryReport, plan: StepPlan, batch: RolloutBatch) -> list[int]:
    """Return engines that found no index although prompts have some.

    The files are then not on their nodes: with as many prompts as they had, chance alone is too
    improbable (`BY_CHANCE`).
    """
    if not plan.groups:
        return []
    without = max(0.0, 1.0 - history.num_indexed / len(plan.groups))
    blind = []
    for share in batch.shares:
        num_prompts = share.drafting.num_without_index / plan.group_size
        if num_prompts and not share.drafting.num_with_index and without**num_prompts < BY_CHANCE:
            blind.append(share.engine)
    return blind


def reward_metrics(rewarded: RewardedBatch) -> dict[str, float]:
    return {
        "critic/score/mean": rewarded.reward_mean,
        "critic/score/max": rewarded.reward_max,
        "critic/score/min": rewarded.reward_min,
        "critic/score/std": rewarded.reward_std,
        "critic/score/best_of_group": rewarded.best_of_group,
        "critic/num_retried": float(rewarded.num_retried),
        "critic/num_unscored": float(rewarded.num_unscored),
        **{_part_name(name): value for name, value in rewarded.parts.items()},
    }


def _part_name(name: str) -> str:
    """Return the metric name of a scorer's number. A star keeps it apart from the run's own."""
    return tracked_name(f"critic/{name}{'*' * (name in _OWN_PARTS)}/mean")


def validation_metrics(
    rewarded: RewardedBatch, sources: Iterable[SourceFigures]
) -> dict[str, float]:
    return {"validation/reward": rewarded.reward_mean, **_named("validation", sources)}


def evaluation_report(
    config: TrainConfig,
    batch: RolloutBatch,
    rewarded: RewardedBatch,
    rewards: pa.Table,
    data_sources: Mapping[str, str],
) -> EvaluationReport:
    """Report on the durable `rewards` (`Store.rewards`). `data_sources`: by prompt key."""
    return EvaluationReport(
        name=config.name,
        model=config.model.path,
        policy_version=batch.policy_version,
        data=config.data.validation_files,
        seed=config.seed,
        samples=config.validation_samples,
        num_rollouts=batch.num_rollouts,
        reward_mean=rewarded.reward_mean,
        sources=sample_figures(rewards, data_sources),
        mean_response_tokens=batch.mean_response_tokens,
        clip_ratio=batch.clip_ratio,
        tokens_per_second=batch.num_tokens / batch.generation_s if batch.generation_s else 0.0,
        run_dir=config.run_dir,
    )


def summary_metrics(summary: RunSummary) -> dict[str, float]:
    """Return the figures to compare runs by, `summary/*`. For other metrics a comparison shows only
    the last step. Times are of the whole run. Rewards are means of an epoch or a validation."""
    figures = {
        "steps": summary.steps,
        "num_rollouts": summary.num_rollouts,
        "reward_first": summary.reward_first,
        "reward_last": summary.reward_last,
        "validation_first": summary.validation_first,
        "validation_last": summary.validation_last,
        "validation_best": summary.validation_best,
        "tokens_per_second": summary.tokens_per_second,
        "acceptance_rate_last": next(iter(summary.acceptance_rate_by_epoch[-1:]), None),
        "speculation_rate_last": next(iter(summary.speculation_rate_by_epoch[-1:]), None),
        **{f"timing_s/{phase}": seconds for phase, seconds in summary.timing_s.items()},
    }
    return {f"summary/{n}": float(value) for n, value in figures.items() if value is not None}


def evaluation_metrics(report: EvaluationReport) -> dict[str, float]:
    """Return metrics for the run of the evaluated checkpoint, named after the evaluation files."""
    data = "-".join(path.stem for path in report.data)
    return _named(f"evaluation/{data}", report.sources)


def _named(prefix: str, sources: Iterable[SourceFigures]) -> dict[str, float]:
    """Return `PREFIX/SOURCE/FIGURE`. MLflow allows no `@`, so write `_at_`, as veRL's logger
    does."""
    return {
        tracked_name(f"{prefix}/{source.data_source}/{name.replace('@', '_at_')}"): value
        for source in sources
        for name, value in source.figures.items()
    }
