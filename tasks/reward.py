"""reward: every rollout of a batch scored, and the scores durable."""

import time

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.report.metrics import summarise_rewards
from schemas.step import RewardedBatch, RolloutBatch
from tasks.history import prepare_history
from tasks.run import current_run


@task(cache_policy=NO_CACHE)
async def reward(batch: RolloutBatch) -> RewardedBatch:
    """Score what has no score yet."""
    run = current_run()
    run.progress.phase(f"{batch.split} step {batch.step}: scoring")
    started = time.perf_counter()
    unscored = await run.store("scoring_rows", batch.split, batch.step)
    if unscored.num_rows:
        scores = await run.scorers.score(unscored, run.inputs.prompts)
        await run.store("add_rewards", batch.split, batch.step, scores)
    rewards = await run.store("rewards", batch.split, batch.step)
    assert rewards.num_rows == batch.num_rollouts
    prepare_history(batch.split, batch.step, rewards["prompt_key"].unique().to_pylist())
    return summarise_rewards(batch, rewards, time.perf_counter() - started)
