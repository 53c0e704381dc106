"""rank_and_group: which engine generates what, in which order."""

import time
from collections.abc import Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.histopipe.dealing import deal_groups
from schemas.rollout import Split
from schemas.step import HistoryReport, StepPlan
from tasks.history import index_prompts
from tasks.run import current_run


@task(cache_policy=NO_CACHE)
async def rank_and_group(step: int, history: HistoryReport) -> StepPlan:
    """Deal the step's prompts over the engines by the lengths of their last epoch."""
    loader = current_run().inputs.loader
    keys = loader.prompts_of(step)
    lengths = (
        await current_run().store("median_lengths", keys, step) if history.num_rollouts else {}
    )
    return await _plan(Split.TRAIN, step, loader.epoch_of(step), step - 1, keys, lengths)


@task(cache_policy=NO_CACHE)
async def plan_validation(policy_version: int) -> StepPlan:
    """Deal the validation prompts over the engines. A validation's step is its policy version."""
    keys = [prompt.key for prompt in current_run().inputs.datasets[Split.VALIDATION].prompts]
    if current_run().config.drafting.enabled:
        await index_prompts(Split.VALIDATION, policy_version, keys)
    return await _plan(Split.VALIDATION, policy_version, 0, policy_version, keys, {})


async def _plan(
    split: Split,
    step: int,
    epoch: int,
    policy_version: int,
    keys: Sequence[str],
    lengths: dict[str, float],
) -> StepPlan:
    run = current_run()
    config = run.config
    validating = split is Split.VALIDATION
    plan = StepPlan(
        split=split,
        step=step,
        epoch=epoch,
        policy_version=policy_version,
        created_s=time.time(),
        group_size=config.validation_samples if validating else config.rollout.group_size,
        groups=deal_groups(keys, lengths, config.rollout.num_engines),
    )
    await run.store("add_plan", plan)
    run.tracker.log_plan(plan)
    return plan
