"""reward: every rollout of a batch scored, and the scores durable."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pyarrow as pa
import pyarrow.compute as pc

from engines.accounting.metrics import summarise_rewards
from engines.bounded import together
from schemas.rollout import Split
from schemas.run import RunRef
from schemas.step import RewardedBatch, RolloutBatch, RolloutOutcome
from tasks.history import prepare_history
from tasks.run.advice import run_task
from tasks.run.attach import Run, attach

GATHER_S = 1.0
"""Between two batches for the scorer while rollouts finish: each costs a transaction."""


@run_task
async def reward(ref: RunRef, batch: RolloutBatch) -> RewardedBatch:
    """Score what has no score yet."""
    run = attach(ref)
    run.progress.phase(f"{batch.split} step {batch.step}: scoring")
    started = time.perf_counter()
    await score_new(run, batch.split, batch.step)
    rewards = await run.store("rewards", batch.split, batch.step)
    assert rewards.num_rows == batch.num_rollouts
    outcome: RolloutOutcome = await run.store("outcome", batch.split, batch.step)
    own = rewards.filter(pc.field("sample_index") >= 0)
    prepare_history(run, batch.split, last_rolled_out(batch.step, own, outcome))
    return summarise_rewards(batch, rewards, time.perf_counter() - started)


def last_rolled_out(step: int, own: pa.Table, outcome: RolloutOutcome) -> dict[str, int]:
    """Prompts of which all samples are there now, with the step that drew them. `own`: rewards of
    this step's plan; a prompt whose sample it has deferred waits for the next step."""
    waiting = {name.prompt_key for name in outcome.deferred}
    planned = set(own["prompt_key"].unique().to_pylist())
    late = {name.prompt_key: step - 1 for name in outcome.carried if name.prompt_key not in planned}
    return late | dict.fromkeys(sorted(planned - waiting), step)


@asynccontextmanager
async def scoring_new(run: Run, split: Split, step: int) -> AsyncGenerator[Callable[[], None]]:
    """Score rollouts while others are generated. Call what it gives when new ones are durable."""
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
    """Score what has no score yet."""
    unscored = await run.rows("scoring_rows", split, step)
    if unscored.counts.num_rows:
        scores = await run.scorers.score(unscored, run.inputs.prompts_of(split))
        await run.store("add_rewards", split, step, scores)
