"""Policies of a step, by what the run knows when its rollouts begin."""

from engines.control.techniques import MoveModel, StepFacts, expected_lengths, plan_policies
from engines.latency.interface import Latency
from engines.pat.costs import SwitchCosts
from engines.rollout.moves import Policy
from schemas.rollout import LengthHistory
from schemas.step import RolloutBatch, StepPlan
from tasks.history import known_before
from tasks.run.attach import Run
from tasks.run.engines import Engines
from tasks.run.preflight import model_shape
from tasks.run.speculation import known_acceptances


async def step_policies(
    run: Run, engines: Engines, plan: StepPlan, last: RolloutBatch | None
) -> tuple[Policy, ...]:
    """Policies of all techniques that are switched on. `last`: rollouts of the last step that has
    all of them."""
    latency = run.inputs.latency if run.config.pat.tp_degrees else None
    facts = StepFacts(
        plan=plan,
        ladder=run.inputs.ladder,
        acceptances=await known_acceptances(run, plan, known_before(run, plan.step)),
        move_model=await _move_model(run, engines, plan, latency, last) if latency else None,
    )
    return plan_policies(run.config, facts)


async def _move_model(
    run: Run, engines: Engines, plan: StepPlan, latency: Latency, last: RolloutBatch | None
) -> MoveModel:
    """The run's latency model, with drafts from history as they were accepted in the last step."""
    return MoveModel(
        latency=latency,
        costs=_costs(run, latency, engines, last),
        pools=engines.pools,
        remaining=expected_lengths(run.config, await _lengths(run, plan)),
        prompt_tokens={key: len(prompt.token_ids) for key, prompt in run.inputs.prompts.items()},
        speculation=last.speculation if last else (1.0, 0),
    )


async def _lengths(run: Run, plan: StepPlan) -> dict[str, LengthHistory]:
    if run.config.pat.lengths == "maximum":
        return {}
    keys = [group.prompt_key for group in plan.groups]
    return await run.store("length_history", keys, known_before(run, plan.step))


def _costs(run: Run, latency: Latency, engines: Engines, last: RolloutBatch | None) -> SwitchCosts:
    pat, shape = run.config.pat, model_shape(run.config)
    synced = last.sync_s if last else 0.0
    return SwitchCosts(
        latency=latency,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        num_kv_heads=shape.num_kv_heads,
        link_bytes_per_s=pat.kv_bytes_per_s,
        wake_s=pat.switch_s,
        weights_s=0.0 if engines.keeps_weights else synced,
        kv=pat.kv,
    )
