"""train: one policy version becomes the next."""

import asyncio
import time
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.learn.checkpoint import checkpoints_dir
from schemas.step import RewardedBatch, TrainReport
from tasks.run.advice import explained
from tasks.run.facts import log_checkpoints
from tasks.run.live import current_run


@task(cache_policy=NO_CACHE)
@explained
async def train_policy(batch: RewardedBatch) -> TrainReport:
    """Train on a batch and publish the new weights, when the step before is done with."""
    run = current_run()
    await run.milestones.committed.wait(batch.step - 1)
    run.progress.phase(f"step {batch.step}: training")
    started = time.perf_counter()
    rows = await run.rows("training_rows", batch.step)
    metrics = await run.trainer.train_step(rows.reference)
    run.weights[batch.step] = await run.trainer.publish(batch.step)
    for version in [v for v in run.weights if v < batch.step - run.config.max_staleness]:
        del run.weights[version]
    await run.milestones.published.reach(batch.step)
    return TrainReport(
        step=batch.step,
        policy_version=batch.step,
        num_tokens=rows.counts.num_tokens,
        metrics=metrics,
        train_s=time.perf_counter() - started,
    )


@task(cache_policy=NO_CACHE)
@explained
async def save_checkpoint(step: int) -> Path | None:
    """A checkpoint where one is due: resuming starts from it. Commits the step."""
    run = current_run()
    loader, path = run.inputs.loader, None
    if step % run.config.trainer.save_every_steps == 0 or step == loader.num_steps:
        run.progress.phase(f"step {step}: saving")
        path = await run.trainer.save(step, loader.state(step))
        if run.mirror is not None:
            keep = run.config.trainer.keep_checkpoints
            await asyncio.to_thread(run.mirror.put, path, keep)
        log_checkpoints(run.tracker, checkpoints_dir(run.config))
    await run.milestones.committed.reach(step)
    return path
