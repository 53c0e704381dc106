"""One RL step: index -> rank -> roll out -> reward -> train."""

from typing import TypeVar, cast

from prefect import flow
from prefect.utilities.annotations import opaque

from schemas.step import RewardedBatch, StepReport
from tasks.history import index_history
from tasks.learn import save_checkpoint, train_policy
from tasks.report import draw_step, report_step, report_validation
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.run.live import current_run
from tasks.schedule import plan_validation, rank_and_group

T = TypeVar("T")


@flow(flow_run_name="step {step}")
async def rl_step(step: int) -> StepReport:
    """Train policy version `step - 1` into version `step`."""
    await current_run().turn(step)
    history = await index_history(step)
    plan = await rank_and_group(step, history)
    batch = await rollout(_whole(plan))
    rewarded = await reward(batch)
    trained = await train_policy(rewarded)
    report = await report_step(history, _whole(plan), batch, rewarded, trained)
    await save_checkpoint(step)
    await current_run().next_is_queued(step)
    await draw_step(report, batch)
    return report


@flow(flow_run_name="version {policy_version}")
async def validation(policy_version: int) -> RewardedBatch:
    """Score a policy version on the held-out prompts."""
    plan = await plan_validation(policy_version)
    batch = await rollout(_whole(plan))
    rewarded = await reward(batch)
    await report_validation(batch, rewarded)
    return rewarded


def _whole(value: T) -> T:
    """Value for a task, opaque: Prefect would look for results of other tasks in every group of a
    plan."""
    return cast("T", opaque(value))
