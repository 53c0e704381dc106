"""A training run: RL steps, one after the other or overlapping."""

import time
from typing import Any

from prefect import flow
from prefect.runtime import flow_run as this_flow_run

from engines.bounded import together
from flows.step import rl_step, validation
from schemas.config import TrainConfig
from schemas.step import RunSummary
from tasks.report import draw_left, show_run
from tasks.run.live import LiveRun, end_cancelled, open_run, write_summary


def _on_cancellation(flow: Any, flow_run: Any, state: Any) -> None:
    """Called when the process has ended; Prefect kills one that takes more than 30 s over it."""
    del flow, state
    end_cancelled(TrainConfig.model_validate(flow_run.parameters["config"]))


@flow(flow_run_name="{config.name}", on_cancellation=[_on_cancellation])
async def train(config: TrainConfig, resume: bool = False) -> RunSummary:
    """Train a policy by reinforcement learning.

    Args:
        config: What to train, on what, and how.
        resume: Go on from the run's last checkpoint. Prefect's Retry does so too.
    """
    started = time.perf_counter()
    async with open_run(config, resume or (this_flow_run.run_count or 1) > 1) as live:
        show_run(live.run)
        await draw_left(live.run)
        await take_steps(live)
        return await write_summary(live.run, time.perf_counter() - started)


async def take_steps(live: LiveRun) -> None:
    """Begin each step when the mode admits it: `sync`, after the one before; `pipelined`, behind
    its rollouts. A policy version is validated before the first step that is rolled out with it."""
    run, reached = live.run, live.milestones
    first, last, lag = run.ref.first_version, run.inputs.loader.num_steps, run.config.max_staleness
    async with together() as steps:
        for step in range(first + 1, last + 1):
            await reached.admits(step)
            await _validate(live, step - 1 - lag)
            steps.create_task(rl_step(step, run.ref, live.engines, reached))
        for version in range(last - lag, last + 1):
            await _validate(live, version)


async def _validate(live: LiveRun, version: int) -> None:
    """Validate a policy version that is due, once it is there."""
    run = live.run
    config, last = run.config, run.inputs.loader.num_steps
    if not config.data.validation:
        return
    every = config.validate_every_steps
    due = version in (0, last) or (every > 0 and version % every == 0)
    if due and version >= run.ref.first_version:
        await live.milestones.published.wait(version)
        await validation(version, run.ref, live.engines, live.milestones)
    await live.milestones.validated.reach(version, None)
