"""train: one policy version becomes the next."""

import time
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from schemas.step import RewardedBatch, TrainReport
from tasks.run import current_run


@task(cache_policy=NO_CACHE)
async def train_policy(batch: RewardedBatch) -> TrainReport:
    """Train on a batch and publish the new weights."""
    run = current_run()
    run.progress.phase(f"step {batch.step}: training")
    started = time.perf_counter()
    rows = await run.store("training_rows", batch.step)
    metrics = await run.trainer.train_step(rows)
    run.weights = await run.trainer.publish(batch.step)
    return TrainReport(
        step=batch.step,
        policy_version=batch.step,
        num_tokens=sum(len(tokens) for tokens in rows["response_token_ids"]),
        metrics=metrics,
        train_s=time.perf_counter() - started,
    )


@task(cache_policy=NO_CACHE)
async def save_checkpoint(step: int) -> Path | None:
    """A checkpoint where one is due: it commits the step, as resuming starts from it."""
    run = current_run()
    loader = run.inputs.loader
    if step % run.config.trainer.save_every_steps and step != loader.num_steps:
        return None
    run.progress.phase(f"step {step}: saving")
    return await run.trainer.save(step, loader.state(step))
