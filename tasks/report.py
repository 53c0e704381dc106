"""report: log, draw and archive a step."""

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from refrain.engines.accounting.metrics import (
    blind_engines,
    step_report,
    timing_metrics,
    validation_metrics,
)
from refrain.engines.accounting.savings import saving_metrics
from refrain.engines.accounting.sources import source_metrics
from refrain.engines.reports.markdown import record_link, step_page
from refrain.engines.reward import sample_figures
from refrain.engines.tracking.mlflow_client import MLFLOW_PAGE
from refrain.schemas.config import TrainConfig
from refrain.schemas.keys import sample_key, stage_name
from refrain.schemas.rollout import Split
from refrain.schemas.run import RunRef
from refrain.schemas.step import (
    HistoryReport,
    RewardedBatch,
    RolloutBatch,
    StepPlan,
    StepReport,
    TrainReport,
)
from refrain.schemas.timeline import Savings
from refrain.tasks.history import pass_rates
from refrain.tasks.run.advice import run_task
from refrain.tasks.run.attach import Run, attach
from refrain.tasks.run.gpus import num_devices
from refrain.tasks.run.timeline import log_timeline

_NUM_SHOWN = 32
"""Rollouts of a step in its MLflow table."""
_NUM_FORETOLD, _FORETOLD_TOKENS = 32, 2048
"""Limits on the prompts, and on the tokens of each response, that predict the gain of drafts."""


def show_run(run: Run) -> None:
    """Add a page about the run itself. All other pages are about its steps."""
    pages = "Each step has its own page: *Subflow Runs*, then a step, then *Artifacts*."
    where = run.config.run_dir
    files = f"In a terminal: `refrain show {where}`, and `refrain samples {where}` for responses."
    run.pages.add("run", "Where to look", "\n\n".join((_record(run), pages, files)))


@run_task
async def report_step(
    ref: RunRef,
    history: HistoryReport,
    plan: StepPlan,
    batch: RolloutBatch,
    rewarded: RewardedBatch,
    trained: TrainReport,
    before: StepReport | None,
) -> StepReport:
    """Write the step's metrics to the store, MLflow and the terminal. `before`: the report of the
    step before, if this process made it."""
    run = attach(ref)
    report = step_report(
        history,
        plan,
        batch,
        rewarded,
        trained,
        before,
        time.time(),
        num_prompt_tokens=_prompt_tokens(run, plan, batch),
        num_devices=num_devices(run.config),
    )
    more = await _data_metrics(run, plan.step)
    report = report.model_copy(update={"metrics": report.metrics | more})
    told = before.metrics.get("history/num_blind_engines") if before else 0
    blind = blind_engines(history, plan, batch)
    if blind and len(blind) != told:
        run.progress.phase(_told_of_blind(report.step, blind, run.config))
    await run.store("add_step", report)
    run.tracker.log_metrics(report.metrics | timing_metrics(report.timing_s), plan.step)
    run.progress.step(report, run.inputs.loader.num_steps)
    return report


async def _data_metrics(run: Run, step: int) -> dict[str, float]:
    """Return the metrics of each source of a mixture, and of the curriculum."""
    loader, metrics = run.inputs.loader, {}
    if len(loader.mixture.portions) > 1:
        rows = await run.store("timed_rollouts", Split.TRAIN, step)
        prompts = run.inputs.prompts_of(Split.TRAIN)
        sources = {key: prompt.source for key, prompt in prompts.items()}
        metrics = source_metrics(rows, sources, run.config.data.pass_score)
    if loader.curriculum:
        num_skipped = len(loader.skipped(step, await pass_rates(run, step)))
        metrics["curriculum/skipped_share"] = num_skipped / loader.num_prompts
    return metrics


def _told_of_blind(step: int, engines: Sequence[int], config: TrainConfig) -> str:
    names = ", ".join(map(str, engines))
    return (
        f"step {step}: engines {names} found no history and drafted nothing, though prompts have "
        f"one. Processes on their nodes must be able to read and write {config.history_dir} "
        "(drafting.index_dir). A node that joined the cluster later gets histories after a resume"
    )


def _prompt_tokens(run: Run, plan: StepPlan, batch: RolloutBatch) -> int:
    """Return the prompt tokens of a step's rollouts, estimated from the mean prompt of its plan. A
    few rollouts may come from the step before."""
    lengths = [len(run.inputs.prompts[group.prompt_key].token_ids) for group in plan.groups]
    return round(sum(lengths) / len(lengths) * batch.num_rollouts)


@run_task
async def draw_step(ref: RunRef, report: StepReport, batch: RolloutBatch) -> None:
    """Draw the step's pages, compute its savings, and archive old steps. The next step
    runs at the same time."""
    run = attach(ref)
    await _draw(run, report, batch)
    if report.step == 1 and run.config.drafting.enabled:
        with run.failures.contained("predicting the gain of drafts"):
            await _predict_gain(run, report)
    trainer = run.config.trainer
    if trainer.routing_replay:
        with run.failures.contained("deleting the experts of old steps"):
            # A run that goes on from its last checkpoint may train on kept rollouts again.
            await run.store("forget_experts", report.step - 2 * trainer.save_every_steps)
    with run.failures.contained("archiving old steps"):
        await run.store("archive_before", report.step)


async def draw_left(run: Run) -> None:
    """Draw steps that an earlier process of the run reported but did not draw."""
    for report in await run.store("steps"):
        if not report.drawn:
            batch: RolloutBatch = await run.store("stage", Split.TRAIN, report.step)
            await _draw(run, report, batch)


async def _draw(run: Run, report: StepReport, batch: RolloutBatch) -> None:
    """Draw a step. Record a failure without stopping the run; the next process of the run tries
    again."""
    drawn = None
    with run.failures.contained("drawing a step"):
        drawn = await _drawn(run, report, batch)
    if drawn:
        await run.store("add_step", drawn)
    with run.failures.contained("writing a step's Parquet files"):
        await run.store("write_step", report.step)


async def _drawn(run: Run, report: StepReport, batch: RolloutBatch) -> StepReport:
    """Draw a step's pages. Return its report with the savings added."""
    savings = await log_stage(run, batch)
    saved = saving_metrics(savings)
    run.tracker.log_metrics(saved, report.step)
    plan: StepPlan = await run.store("plan", Split.TRAIN, report.step)
    num_steps = run.inputs.loader.num_steps
    page = step_page(run.config, plan, batch, report, num_steps, _record(run), savings)
    run.pages.add("step", f"Step {report.step} of {num_steps}", page)
    return report.model_copy(update={"metrics": report.metrics | saved, "drawn": True})


async def _predict_gain(run: Run, report: StepReport) -> None:
    """Log, after the first step, how much drafts will speed up its prompts in the next epoch."""
    from refrain.engines.histospec.predicted_gain import CHEAP, DEAR, predict_gain

    keys = run.inputs.loader.prompts_of(report.step)[:_NUM_FORETOLD]
    rows = await run.store("index_rows", Split.TRAIN, dict.fromkeys(keys, report.step))
    groups = await asyncio.to_thread(_response_groups, rows, run.config)
    gain = await asyncio.to_thread(predict_gain, groups, run.config.engine.drafting)
    if gain is None:
        return
    run.progress.phase(
        f"the policy has {report.metrics['actor/entropy']:.2f} nats a token. When prompts return, "
        f"drafts will give about {gain.where_cheap:.2f} times the tokens/s if verifying a token "
        f"takes {CHEAP:g} of generating one (a GPU), {gain.where_dear:.2f} times if it takes "
        f"{DEAR:g} (a CPU). This is predicted from {len(groups)} prompts; `refrain bench real` "
        "measures it"
    )


def _response_groups(rows: Any, config: TrainConfig) -> list[Any]:
    """Return the complete groups of a table `tables.INDEXED`, for `predict_gain`. The table is in
    the samples' order."""
    from refrain.engines.histospec.index import turn_sizes
    from refrain.engines.histospec.predicted_gain import ResponseGroup

    found: dict[str, list[dict]] = {}
    for row in rows.to_pylist():
        found.setdefault(row["prompt_key"], []).append(row)
    size = config.rollout.group_size
    return [
        ResponseGroup(
            np.array(group[0]["prompt_token_ids"], np.int32),
            [np.array(row["response_token_ids"][:_FORETOLD_TOKENS], np.int32) for row in group],
            [sample_key(config.seed, group[0]["step"], Split.TRAIN, key, i) for i in range(size)],
            [turn_sizes(row["turns"]) for row in group],
        )
        for key, group in found.items()
        if len(group) == size
    ]


@run_task
async def report_validation(ref: RunRef, batch: RolloutBatch, rewarded: RewardedBatch) -> None:
    """Write a validation to MLflow and to the terminal."""
    run = attach(ref)
    with run.failures.contained("recording a validation"):
        rewards = await run.store("rewards", batch.split, batch.step)
        own = run.inputs.prompts_of(batch.split)
        sources = {key: prompt.data_source for key, prompt in own.items()}
        metrics = validation_metrics(rewarded, sample_figures(rewards, sources))
        run.tracker.log_metrics(metrics, batch.step)
        run.tracker.log_validated(batch.step)
        await log_stage(run, batch)
    run.progress.phase(
        f"validation of policy version {batch.step}: reward {rewarded.reward_mean:.3f}"
    )


def _record(run: Run) -> str:
    page = os.environ.get(MLFLOW_PAGE) or os.environ.get("MLFLOW_TRACKING_URI")
    runs_dir, tracker = str(run.config.runs_dir), run.tracker
    return record_link(page, runs_dir, tracker.experiment_id, tracker.run_id)


async def log_stage(run: Run, batch: RolloutBatch) -> Savings | None:
    """Log a timeline and a table of scored rollouts. Return the savings."""
    name = stage_name(batch.split, batch.step)
    timed = await run.store("timed_rollouts", batch.split, batch.step)
    savings = await log_timeline(run, batch, timed)
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
    run.tracker.log_table("rollouts", name, table)
    return savings
