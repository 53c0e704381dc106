"""A training run: a loop of RL steps."""

import time

from prefect import flow
from prefect.runtime import flow_run

from flows.step import rl_step, validation
from schemas.config import TrainConfig
from schemas.step import RunSummary
from tasks.run import open_run, write_summary


@flow(flow_run_name="{config.name}")
async def train(config: TrainConfig, resume: bool = False) -> RunSummary:
    """Train a policy by reinforcement learning.

    Args:
        config: What to train, on what, and how.
        resume: Go on from the run's last checkpoint. Prefect's Retry does so too.
    """
    started = time.perf_counter()
    async with open_run(config, resume or (flow_run.run_count or 1) > 1) as run:
        first, last = run.weights.policy_version, run.inputs.loader.num_steps
        for version in range(first, last + 1):
            if version > first:
                await rl_step(version)
            if _validates(config, version, last):
                await validation(version)
        return await write_summary(run, time.perf_counter() - started)


def _validates(config: TrainConfig, version: int, last: int) -> bool:
    every = config.validate_every_steps
    due = version in (0, last) or (every > 0 and version % every == 0)
    return due and bool(config.data.validation)
