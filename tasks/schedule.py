"""rank_and_group: which engine generates what, in which order."""

import time
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.histopipe.dealing import deal_groups
from engines.histopipe.estimate import estimate_rollout_s
from engines.histopipe.placement import RolloutTime, plan_placement
from engines.histopipe.ranking import length_growth
from schemas.rollout import LengthHistory, Split
from schemas.step import HistoryReport, PromptGroup, StepPlan
from tasks.history import index_prompts, known_before
from tasks.run.advice import explained
from tasks.run.live import Run, current_run
from tasks.run.speculation import choose_drafting, choose_trials


@task(cache_policy=NO_CACHE)
@explained
async def rank_and_group(step: int, history: HistoryReport) -> StepPlan:
    """Put the step's prompts on the engines by the lengths of their last epoch."""
    run = current_run()
    loader, config = run.inputs.loader, run.config
    keys, engines = loader.prompts_of(step), config.rollout.num_engines
    lengths: dict[str, LengthHistory] = {}
    if history.num_rollouts:
        lengths = await run.store("length_history", keys, known_before(run, step))
    version, epoch = run.version_of(step), loader.epoch_of(step)
    if not (config.ranks_prompts and lengths):
        medians = {key: length.median_tokens for key, length in lengths.items()}
        return await _plan(Split.TRAIN, step, epoch, version, deal_groups(keys, medians, engines))
    group_size, settings = config.rollout.group_size, config.histopipe
    placement = plan_placement(
        settings, keys, lengths, step, engines, group_size, _rollout_time(run)
    )
    return await _plan(
        Split.TRAIN,
        step,
        epoch,
        version,
        placement.groups,
        ranking_groups=placement.ranking_groups,
        length_growth=length_growth(lengths, settings.min_growth),
    )


def _rollout_time(run: Run) -> RolloutTime | None:
    """By the profile, with drafts as they were accepted in the last step."""
    latency, config = run.inputs.latency, run.config
    if latency is None or not config.histopipe.two_tier:
        return None
    tokens_per_pass, window = run.last_batch.speculation if run.last_batch else (1.0, 0)
    return partial(
        estimate_rollout_s,
        latency,
        config.rollout.tp_degree,
        max_num_seqs=config.rollout.max_num_seqs,
        tokens_per_pass=tokens_per_pass,
        window=window,
    )


@task(cache_policy=NO_CACHE)
@explained
async def plan_validation(policy_version: int) -> StepPlan:
    """Deal the validation prompts over the engines. A validation's step is its policy version."""
    keys = [prompt.key for prompt in current_run().inputs.datasets[Split.VALIDATION].prompts]
    if current_run().config.drafting.enabled:
        await index_prompts(Split.VALIDATION, policy_version, keys)
    groups = deal_groups(keys, {}, current_run().config.rollout.num_engines)
    return await _plan(Split.VALIDATION, policy_version, 0, policy_version, groups)


async def _plan(
    split: Split,
    step: int,
    epoch: int,
    policy_version: int,
    groups: tuple[PromptGroup, ...],
    **ranking: Any,
) -> StepPlan:
    run = current_run()
    config = run.config
    validating = split is Split.VALIDATION
    group_size = config.validation_samples if validating else config.rollout.group_size
    num_requests = len(groups) * group_size
    plan = StepPlan(
        split=split,
        step=step,
        epoch=epoch,
        policy_version=policy_version,
        created_s=time.time(),
        group_size=group_size,
        groups=groups,
        drafting=choose_drafting(run, num_requests),
        trials={} if validating else choose_trials(run, step, num_requests),
        **ranking,
    )
    await run.store("add_plan", plan)
    run.tracker.log_plan(plan)
    return plan
