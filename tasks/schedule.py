"""rank_and_group: plan which engine generates which prompts, and in which order."""

import time
from collections.abc import Mapping

from refrain.engines.data.sources import with_sources
from refrain.engines.histopipe.passes import TOKENS, ExpectedPasses, fit_passes
from refrain.engines.histopipe.placement import (
    Placement,
    RolloutTime,
    deal_groups,
    place_prompts,
    time_rollouts,
)
from refrain.engines.latency.measured import measured_by
from refrain.schemas.rollout import LengthHistory, Split
from refrain.schemas.run import RunRef
from refrain.schemas.step import HistoryReport, RolloutBatch, StepPlan
from refrain.tasks.history import drawn_prompts, index_prompts, known_before, last_known
from refrain.tasks.run.advice import run_task
from refrain.tasks.run.attach import Run, attach
from refrain.tasks.run.policies import choose_drafting, choose_trials, kv_capacity_tokens


@run_task
async def rank_and_group(
    ref: RunRef,
    step: int,
    history: HistoryReport,
    engines: tuple[int, ...],
) -> StepPlan:
    """Plan a step: place its prompts on these engines by the response lengths of the last epoch."""
    run = attach(ref)
    loader, config = run.inputs.loader, run.config
    keys = await drawn_prompts(run, step)
    lengths: dict[str, LengthHistory] = {}
    if history.num_rollouts:
        lengths = await run.store("length_history", keys, known_before(run, step))
    version, epoch = ref.version_of(step, config.staleness), loader.epoch_of(step)
    last = await last_known(run, step)
    placement, growth = place_prompts(
        config,
        keys,
        lengths,
        step,
        len(engines),
        _rollout_time(run, last),
        expect_passes(run, lengths, last),
    )
    return await _plan(run, Split.TRAIN, step, epoch, version, placement.on(engines), growth)


def expect_passes(
    run: Run, lengths: Mapping[str, LengthHistory], last: RolloutBatch | None
) -> ExpectedPasses:
    """Return the expected passes of prompts, from their last epoch and the tokens per pass of the
    last known step. Without drafting, each token takes one pass."""
    if not run.config.engine.speculates:
        return TOKENS
    return fit_passes(lengths, last.speculation[0] if last else None)


def _rollout_time(run: Run, last: RolloutBatch | None) -> RolloutTime | None:
    """Return an estimate of rollout times, from the profile or from the engines' measurements in
    the last step. It assumes as many drafts per pass as in the last step."""
    profiled = run.inputs.latency
    latency = profiled or (measured_by(last.shares) if last else None)
    window = last.speculation[1] if last and run.config.engine.speculates else 0
    return time_rollouts(run.config, latency, window, kv_capacity_tokens(run))


@run_task
async def plan_validation(ref: RunRef, policy_version: int, engines: tuple[int, ...]) -> StepPlan:
    """Plan a validation: place its prompts on these engines. Its step is the policy version."""
    run = attach(ref)
    keys = [prompt.key for prompt in run.inputs.datasets[Split.VALIDATION].prompts]
    if run.config.drafting.enabled:
        await index_prompts(run, Split.VALIDATION, policy_version, keys)
    placement = Placement(deal_groups(keys, {}, len(engines))).on(engines)
    return await _plan(run, Split.VALIDATION, policy_version, 0, policy_version, placement)


async def _plan(
    run: Run,
    split: Split,
    step: int,
    epoch: int,
    policy_version: int,
    placement: Placement,
    growth: float | None = None,
) -> StepPlan:
    config = run.config
    validating = split is Split.VALIDATION
    group_size = config.validation_samples if validating else config.rollout.group_size
    num_requests = len(placement.groups) * group_size
    health = await run.drafter_health(step + 1 if validating else known_before(run, step))
    plan = StepPlan(
        split=split,
        step=step,
        epoch=epoch,
        policy_version=policy_version,
        created_s=time.time(),
        group_size=group_size,
        groups=with_sources(placement.groups, run.inputs.prompts_of(split)),
        ranking_groups=placement.ranking_groups,
        expected_s=placement.expected_s,
        equal_s=placement.equal_s,
        length_growth=growth,
        drafting=choose_drafting(run, health, num_requests),
        trials={} if validating else choose_trials(run, health, step, num_requests),
    )
    await run.store("add_plan", plan)
    run.tracker.log_plan(plan)
    return plan
