"""rollout: every planned sample generated and durable."""

import time
from collections.abc import Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.report.metrics import SUMMARISED_COLUMNS, summarise_rollouts
from engines.rollout.moves import RolloutView
from schemas.keys import sample_key
from schemas.rollout import RequestId, Rollout, RolloutRequest
from schemas.step import RolloutBatch, StepPlan
from tasks.run import Run, current_run


@task(cache_policy=NO_CACHE)
async def rollout(plan: StepPlan) -> RolloutBatch:
    """Bring the engines to the plan's policy version and generate what is not there yet."""
    run = current_run()
    run.progress.phase(f"{plan.split} step {plan.step}: weight sync")
    sync_started = time.perf_counter()
    canary_error = await _sync(run, plan)
    sync_s = time.perf_counter() - sync_started
    done: set[RequestId] = await run.store(
        "finished_ids", plan.split, plan.step, plan.policy_version
    )

    num_drafted = num_accepted = 0

    async def keep(rollouts: Sequence[Rollout]) -> None:
        nonlocal num_drafted, num_accepted
        num_drafted += sum(rollout.generated.num_draft_tokens for rollout in rollouts)
        num_accepted += sum(rollout.generated.num_accepted_tokens for rollout in rollouts)
        await run.store("add_rollouts", rollouts, plan.epoch)

    def show(view: RolloutView) -> None:
        accepted = num_accepted / num_drafted if num_drafted else None
        num_finished = len(done) + view.num_finished
        run.progress.rolling(num_finished, plan.num_rollouts, view.num_tokens, accepted)

    run.progress.phase(f"{plan.split} step {plan.step}: rolling out")
    started = time.perf_counter()
    shares = await run.coordinator.roll_out(_assignments(run, plan, done), keep, show)
    generation_s = time.perf_counter() - started
    rows = await run.store("rollouts", plan.split, plan.step, SUMMARISED_COLUMNS)
    assert rows.num_rows == plan.num_rollouts
    return summarise_rollouts(plan, rows, shares, sync_s, generation_s, canary_error)


async def _sync(run: Run, plan: StepPlan) -> float | None:
    assert run.weights.policy_version == plan.policy_version, "the plan is of another version"
    if run.coordinator.policy_version == plan.policy_version:
        return None
    return await run.coordinator.load_weights(run.weights)


def _assignments(
    run: Run, plan: StepPlan, done: set[RequestId]
) -> list[tuple[int, RolloutRequest]]:
    """(engine, request) for every sample that is not done."""
    seed, max_tokens = run.config.seed, run.config.data.max_response_tokens
    return [
        (
            group.engine,
            RolloutRequest(
                id=id,
                prompt_token_ids=run.inputs.prompts[group.prompt_key].token_ids,
                sample_key=sample_key(seed, plan.step, plan.split, group.prompt_key, i),
                max_response_tokens=max_tokens,
            ),
        )
        for group in plan.groups
        for i in range(plan.group_size)
        if (id := RequestId(plan.split, plan.step, group.prompt_key, i)) not in done
    ]
