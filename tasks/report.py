"""report: what a person sees of a step."""

import time

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.report.metrics import step_report, validation_metrics
from engines.reward import sample_figures
from schemas.step import (
    HistoryReport,
    RewardedBatch,
    RolloutBatch,
    StepPlan,
    StepReport,
    TrainReport,
)
from tasks.run import current_run

_NUM_SHOWN = 32
"""Rollouts of a step in its MLflow table."""


@task(cache_policy=NO_CACHE)
async def report_step(
    history: HistoryReport,
    plan: StepPlan,
    batch: RolloutBatch,
    rewarded: RewardedBatch,
    trained: TrainReport,
) -> StepReport:
    """Write the step to the store, to MLflow and to the terminal."""
    run = current_run()
    began_s = max(plan.created_s, run.reported_s)
    run.reported_s = time.time()
    report = step_report(history, plan, batch, rewarded, trained, began_s, run.reported_s)
    await run.store("add_step", report)
    timings = {f"timing_s/{name}": seconds for name, seconds in report.timing_s.items()}
    run.tracker.log_metrics(report.metrics | timings, plan.step)
    await log_rollouts(batch)
    run.progress.step(report, run.inputs.loader.num_steps)
    return report


@task(cache_policy=NO_CACHE)
async def report_validation(batch: RolloutBatch, rewarded: RewardedBatch) -> None:
    """Write a validation to MLflow and to the terminal."""
    run = current_run()
    rewards = await run.store("rewards", batch.split, batch.step)
    sources = {key: prompt.data_source for key, prompt in run.inputs.prompts.items()}
    metrics = validation_metrics(rewarded, sample_figures(rewards, sources))
    run.tracker.log_metrics(metrics, batch.step)
    await log_rollouts(batch)
    run.progress.phase(
        f"validation of policy version {batch.step}: reward {rewarded.reward_mean:.3f}"
    )


async def log_rollouts(batch: RolloutBatch) -> None:
    """A table of some of its rollouts to MLflow."""
    run = current_run()
    rows = await run.store("shown_rollouts", batch.split, batch.step, _NUM_SHOWN)
    decode = run.inputs.tokenizer.decode
    table = [
        {
            "prompt": decode(row["prompt_token_ids"]),
            "response": decode(row["response_token_ids"]),
            **{name: row[name] for name in ("reward", "response_tokens", "finish_reason")},
        }
        for row in rows.to_pylist()
    ]
    run.tracker.log_rollouts(table, f"{batch.split}-{batch.step:05d}")
