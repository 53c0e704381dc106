"""When the engines of a step go over to another TP degree."""

from engines.pat.costs import SwitchCosts
from engines.pat.remaining import FromHistory, Maximum, Remaining
from engines.pat.switch import Stage, Switching
from engines.rollout.moves import Policy
from schemas.rollout import LengthHistory
from schemas.step import StepPlan
from tasks.history import known_before
from tasks.preflight import model_shape
from tasks.run import Run


async def switching_policies(run: Run, plan: StepPlan) -> tuple[Policy, ...]:
    """PAT's, where there are engines of several TP degrees."""
    config, latency = run.config, run.inputs.switch_latency
    if latency is None:
        return ()
    rollout = config.rollout
    stage = Stage(
        latency=latency,
        costs=_costs(run),
        remaining=await _remaining(run, plan),
        prompt_tokens={key: len(p.token_ids) for key, p in run.inputs.prompts.items()},
        max_num_seqs=dict.fromkeys(config.tp_degrees, rollout.max_num_seqs),
        default_drafting=run.last_batch.speculation if run.last_batch else (1.0, 0),
    )
    return (Switching(stage, run.engines.pools),)


async def _remaining(run: Run, plan: StepPlan) -> Remaining:
    """How long the plan's responses are taken to be."""
    config = run.config
    max_tokens = config.data.max_response_tokens
    if config.pat.lengths == "maximum":
        return Maximum(max_tokens)
    keys = [group.prompt_key for group in plan.groups]
    lengths: dict[str, LengthHistory] = await run.store(
        "length_history", keys, known_before(run, plan.step)
    )
    return FromHistory(lengths, max_tokens, group_size=config.rollout.group_size)


def _costs(run: Run) -> SwitchCosts:
    assert run.inputs.switch_latency is not None
    pat, shape = run.config.pat, model_shape(run.config)
    synced = run.last_batch.sync_s if run.last_batch else 0.0
    return SwitchCosts(
        latency=run.inputs.switch_latency,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        num_kv_heads=shape.num_kv_heads,
        link_bytes_per_s=pat.kv_bytes_per_s,
        wake_s=pat.switch_s,
        weights_s=0.0 if run.engines.keeps_weights else synced,
        kv=pat.kv,
    )
