"""A training run: RL steps one after the other or overlapping (`staleness`)."""

import time
from typing import Any

from prefect import flow, tags

from refrain.engines.bounded import is_cancelled, together
from refrain.flows.prepare import training_plan
from refrain.flows.step import rl_step, validation
from refrain.flows.subflow import call_numbered, is_retried, tried_again
from refrain.schemas.config import TrainConfig
from refrain.schemas.step import RunSummary
from refrain.tasks.report import draw_left, show_run
from refrain.tasks.run.crashes import has_begun, is_crash, note_crash
from refrain.tasks.run.end_killed import end_killed
from refrain.tasks.run.live import LiveRun, open_run, write_summary
from refrain.tasks.run.plan import RunPlan, plan_again


def _on_end(flow: Any, flow_run: Any, state: Any) -> None:
    """End a run that was cancelled or has crashed. Prefect kills a process that takes more than
    30 s to end."""
    del flow, state
    config = TrainConfig.model_validate(flow_run.parameters["config"])
    end_killed(config.run_dir, config.runs_dir)


@flow(flow_run_name="{config.name}", on_cancellation=[_on_end], on_crashed=[_on_end])
async def train(config: TrainConfig, resume: bool = False) -> RunSummary:
    """Train a policy by reinforcement learning.

    Args:
        config: The model, the data and all other settings.
        resume: Continue from the run's last checkpoint. Prefect's Retry does so too.
    """
    with tags(config.name):
        return await _train_on(training_plan(config, resume or is_retried(config.run_dir)))


async def _train_on(plan: RunPlan) -> RunSummary:
    """Train, and resume after crashes, at most `trainer.max_failures` times."""
    config, started, goes_on = plan.config, time.perf_counter(), ""
    for num_left in reversed(range(config.trainer.max_failures + 1)):
        try:
            with tried_again(bool(goes_on)):
                return await _train(plan_again(plan) if goes_on else plan, started, goes_on)
        except Exception as error:
            goes_on_after = num_left and is_crash(error) and has_begun(config.run_dir)
            if is_cancelled() or not goes_on_after:
                raise
            goes_on = note_crash(config.run_dir, error, num_left)
    raise AssertionError("the last try returns or raises")


async def _train(plan: RunPlan, started: float, goes_on: str) -> RunSummary:
    """Train in one try. `started`: start of the first try, on the performance counter. `goes_on`:
    the reason for another try, or empty."""
    async with open_run(plan) as live:
        if goes_on:
            live.run.progress.phase(goes_on)
        show_run(live.run)
        await draw_left(live.run)
        await take_steps(live)
        return await write_summary(live.run, time.perf_counter() - started)


async def take_steps(live: LiveRun) -> None:
    """Start each step when `staleness` admits it: with 0 after the step before, else as soon as
    that step's rollouts are queued. Validate a policy version before a step uses it."""
    run, reached = live.run, live.milestones
    first, last, lag = run.ref.first_version, run.inputs.loader.num_steps, run.config.staleness
    async with together() as steps:
        for step in range(first + 1, last + 1):
            await reached.admits(step)
            await _validate(live, step - 1 - lag)
            builds_on = await reached.begun.left_by(max(first, step - 1 - lag))
            call = call_numbered(
                rl_step, step, step, run.ref, live.engines, reached, wait_for=builds_on
            )
            steps.create_task(call)
        for version in range(last - lag, last + 1):
            await _validate(live, version)


async def _validate(live: LiveRun, version: int) -> None:
    """Validate a policy version, if it is due, as soon as it is published."""
    run, reached = live.run, live.milestones
    config, last = run.config, run.inputs.loader.num_steps
    if not config.data.validation:
        return
    every = config.validate_every_steps
    due = version in (0, last) or (every > 0 and version % every == 0)
    if due and version >= run.ref.first_version:
        await reached.published.wait(version)
        builds_on = await reached.begun.left_by(version)
        await call_numbered(
            validation, version, version, run.ref, live.engines, reached, wait_for=builds_on
        )
    await reached.validated.reach(version, None)
