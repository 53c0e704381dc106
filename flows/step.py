"""One RL step: index -> rank -> rollout -> reward -> train."""

from contextlib import AsyncExitStack

from prefect import flow

from refrain.engines.gpus.gpu_sharing import Role
from refrain.flows.subflow import this_call
from refrain.schemas.run import RunRef
from refrain.schemas.step import RewardedBatch, StepReport
from refrain.tasks.history import index_history
from refrain.tasks.learn import save_checkpoint, train_policy
from refrain.tasks.report import draw_step, report_step, report_validation
from refrain.tasks.reward import reward
from refrain.tasks.rollout import rollout
from refrain.tasks.run.engines import Engines
from refrain.tasks.run.milestones import Milestones
from refrain.tasks.schedule import plan_validation, rank_and_group


@flow(flow_run_name="step {step}")
async def rl_step(step: int, run: RunRef, engines: Engines, reached: Milestones) -> StepReport:
    """Train policy version `step - 1` into version `step`."""
    await reached.begun.reach(step, [this_call()])
    await reached.turn(step)
    history = await index_history(run, step)
    plan = await rank_and_group(run, step, history, engines.living)
    weights = await reached.published.left_by(plan.policy_version)
    async with engines.turns.of(Role.ENGINES):
        batch = await rollout(run, plan, weights, engines)
    rewarded = await reward(run, batch)
    await reached.committed.wait(step - 1)
    async with AsyncExitStack() as turn:
        await turn.enter_async_context(engines.turns.of(Role.TRAINER))
        trained = await train_policy(run, rewarded)
        await reached.published.reach(step, trained.weights)
        before = await reached.drawn.left_by(step - 1)
        report = await report_step(run, history, plan, batch, rewarded, trained, before)
        await reached.reported.reach(step, None)
        # A run resumed from this checkpoint has no earlier weights, so validate them first.
        await reached.validated.wait(step - 1)
        if not engines.trainer_leaves:
            await turn.aclose()
        await save_checkpoint(run, report)
    await reached.committed.reach(step, None)
    await reached.next_is_queued(step)
    await draw_step(run, report, batch)
    await reached.drawn.reach(step, report)
    return report


@flow(flow_run_name="version {policy_version}")
async def validation(
    policy_version: int, run: RunRef, engines: Engines, reached: Milestones
) -> RewardedBatch:
    """Score a policy version on the held-out prompts."""
    plan = await plan_validation(run, policy_version, engines.living)
    weights = await reached.published.left_by(policy_version)
    async with engines.turns.of(Role.ENGINES):
        batch = await rollout(run, plan, weights, engines)
    rewarded = await reward(run, batch)
    await report_validation(run, batch, rewarded)
    return rewarded
