"""train: update the policy, publish its weights and save checkpoints."""

import time
from pathlib import Path

from refrain.engines.learn.checkpoint import checkpoints_dir
from refrain.schemas.run import RunRef
from refrain.schemas.step import RewardedBatch, StepReport, TrainReport
from refrain.tasks.run.advice import run_task
from refrain.tasks.run.attach import attach
from refrain.tasks.run.run_metadata import log_checkpoints


@run_task
async def train_policy(ref: RunRef, batch: RewardedBatch) -> TrainReport:
    """Train on a batch and publish the new weights."""
    run = attach(ref)
    run.progress.phase(f"step {batch.step}: training")
    started = time.perf_counter()
    rows = await run.rows("training_rows", batch.step)
    metrics = await run.trainer.train_step(rows.reference)
    trained = time.perf_counter()
    weights = await run.trainer.publish(batch.step)
    for failure in weights.not_handed:
        run.progress.phase(f"{failure}; it reads the weights from their file instead")
    for warning in weights.warnings:
        run.progress.warn(warning)
    metrics = metrics | {"timing_s/publish": time.perf_counter() - trained}
    if weights.arrived is not None:
        metrics["actor/lora_arrived"] = weights.arrived
    return TrainReport(
        step=batch.step,
        policy_version=batch.step,
        num_tokens=rows.counts.num_tokens,
        metrics=metrics,
        train_s=time.perf_counter() - started,
        weights=weights,
    )


@run_task
async def save_checkpoint(ref: RunRef, report: StepReport) -> Path | None:
    """Save a checkpoint if one is due for the reported step, and return its path. A resumed run
    starts from it. The next step's rollouts run at the same time."""
    run, step = attach(ref), report.step
    loader, path = run.inputs.loader, None
    if step % run.config.trainer.save_every_steps == 0 or step == loader.num_steps:
        run.progress.phase(f"step {step}: saving")
        path = await run.trainer.save(step, loader.state(step))
        with run.failures.contained("listing checkpoints in MLflow"):
            log_checkpoints(run.tracker, checkpoints_dir(run.config))
    return path
