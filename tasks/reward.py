"""reward: score all rollouts of a batch, and store the scores."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from refrain.engines.accounting.metrics import summarise_rewards
from refrain.engines.bounded import together
from refrain.schemas.config import TrainConfig
from refrain.schemas.rollout import Split
from refrain.schemas.run import RunRef
from refrain.schemas.step import RewardedBatch, RolloutBatch, RolloutOutcome
from refrain.tasks.history import prepare_history
from refrain.tasks.run.advice import run_task
from refrain.tasks.run.attach import Run, attach

GATHER_S = 1.0
"""Seconds between two batches for the scorer during the rollouts. Each costs a transaction."""


@run_task
async def reward(ref: RunRef, batch: RolloutBatch) -> RewardedBatch:
    """Score the rollouts of a batch that have no score yet, and start to index them."""
    run = attach(ref)
    run.progress.phase(f"{batch.split} step {batch.step}: scoring")
    started = time.perf_counter()
    await score_new(run, batch.split, batch.step)
    rewards = await run.store("rewards", batch.split, batch.step)
    num_left_out = batch.num_failed if leaves_out(run.config, batch.split) else 0
    assert rewards.num_rows == batch.num_rollouts - num_left_out
    outcome: RolloutOutcome = await run.store("outcome", batch.split, batch.step)
    own = rewards.filter(pc.field("sample_index") >= 0)
    prepare_history(run, batch.split, last_rolled_out(batch.step, own, outcome))
    return summarise_rewards(batch, rewards, time.perf_counter() - started)


def last_rolled_out(step: int, own: pa.Table, outcome: RolloutOutcome) -> dict[str, int]:
    """Return the prompts whose samples are all finished, with the step that drew each.

    `own`: rewards of this step's plan. A prompt with a deferred sample is left to the next step.
    """
    waiting = {name.prompt_key for name in outcome.deferred}
    planned = set(own["prompt_key"].unique().to_pylist())
    late = {name.prompt_key: step - 1 for name in outcome.carried if name.prompt_key not in planned}
    return late | dict.fromkeys(sorted(planned - waiting), step)


@asynccontextmanager
async def scoring_new(run: Run, split: Split, step: int) -> AsyncGenerator[Callable[[], None]]:
    """Score rollouts while others are generated. Yield a function: call it when new rollouts are
    stored."""
    news = asyncio.Event()

    async def score() -> None:
        while await news.wait():
            news.clear()
            await score_new(run, split, step)
            await asyncio.sleep(GATHER_S)

    async with together() as tasks:
        scorer = tasks.create_task(score())
        yield news.set
        scorer.cancel()


async def score_new(run: Run, split: Split, step: int) -> None:
    """Score the rollouts of a step that have no score yet, and can have one already."""
    unscored = await run.rows("scoring_rows", split, step, **which_to_score(run.config, split))
    if unscored.counts.num_rows:
        scores = await run.scorers.score(unscored, run.inputs.prompts_of(split))
        await run.store("add_rewards", split, step, scores)


def which_to_score(config: TrainConfig, split: Split) -> dict[str, Any]:
    """Return the arguments of `Store.scoring_rows`."""
    validates = split is Split.VALIDATION
    group_size = config.validation_samples if validates else config.rollout.group_size
    return {
        "leave_out": leaves_out(config, split),
        "num_finished": group_size if any(reward.group for reward in config.rewards) else 1,
    }


def leaves_out(config: TrainConfig, split: Split) -> bool:
    """Return whether failed conversations get no reward. Validations score them 0, as each of their
    prompts has equally many samples."""
    environment = config.environment
    return bool(environment) and environment.on_error == "leave_out" and split is Split.TRAIN
