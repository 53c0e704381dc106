"""Choose the drafter and the policies of a step, from what the run knows when rollouts begin."""

from collections.abc import Mapping
from math import inf

from refrain.engines.control.stage_end import StageEnd
from refrain.engines.control.techniques import (
    MoveModel,
    StepInputs,
    draft_setting,
    expected_lengths,
    plan_policies,
    sample_queue,
    stage_outlook,
    tokens_to_come,
)
from refrain.engines.histopipe.group_lengths import GroupLengths
from refrain.engines.histopipe.ranking import context_rates
from refrain.engines.histopipe.sample_queue import SampleQueue
from refrain.engines.latency.interface import Latency
from refrain.engines.latency.measured import measured_by
from refrain.engines.pat.costs import SwitchCosts
from refrain.engines.rollout.moves import MovesKV, Policy, moves_long
from refrain.engines.specactor.health import DrafterHealth
from refrain.engines.specactor.ladder import choose_drafter
from refrain.schemas.config import TrainConfig
from refrain.schemas.drafting import HISTORY, NGRAM
from refrain.schemas.rollout import DraftSetting, LengthHistory, Split
from refrain.schemas.step import RolloutBatch, StepPlan
from refrain.tasks.history import known_before, last_known
from refrain.tasks.run.attach import Run
from refrain.tasks.run.engines import Engines
from refrain.tasks.run.model_inputs import model_shape

FIRST_SWITCH_S = 0.5
"""Seconds of a switch, without the KV cache, until the run has measured one. No setting, because it
has no effect after the first switch."""
FIRST_KV_BYTES_PER_S = 2e9
"""Bytes per second between a GPU's KV cache and host memory, until the run has measured it."""


def choose_drafting(run: Run, health: DrafterHealth, num_requests: int) -> DraftSetting | None:
    """Return the draft setting that a step's requests begin with. None: the engines draft from
    history by themselves. With a draft ladder, choose the best drafter of the last steps."""
    specactor, ladder = run.config.specactor, run.inputs.ladder
    if ladder is None or specactor.drafter != HISTORY:
        return draft_setting(run.config, specactor.drafter)
    batch = _batch(run.config, num_requests)
    acceptances = health.acceptances(ladder, batch)
    chosen = choose_drafter(ladder, acceptances, batch)
    return draft_setting(run.config, chosen.drafter, chosen.window) if chosen else None


def choose_trials(run: Run, health: DrafterHealth, step: int, num_requests: int) -> dict[str, int]:
    """Return how many requests of a step try each unused or collapsed drafter."""
    ladder = run.inputs.ladder
    if ladder is None:
        return {}
    return health.trials(step, ladder, _batch(run.config, num_requests), num_requests)


def settings_of(run: Run, plan: StepPlan) -> list[DraftSetting | None]:
    """Return the draft setting that each request of a plan begins with, in the plan's order."""
    tried = [
        draft_setting(run.config, drafter)
        for drafter, num_requests in plan.trials.items()
        for _ in range(num_requests)
    ]
    return [*tried, *[plan.drafting] * plan.num_planned][: plan.num_planned]


async def known_acceptances(run: Run, plan: StepPlan, before_step: int) -> dict[str, float]:
    """Return each drafter's acceptance in the last steps. Empty without a ladder."""
    ladder = run.inputs.ladder
    if ladder is None:
        return {}
    health = await run.drafter_health(before_step)
    return dict(health.acceptances(ladder, _batch(run.config, plan.num_planned)))


async def tell_collapses(run: Run, plan: StepPlan) -> None:
    """Log which drafters have collapsed. Call this after a step's rollouts."""
    ladder = run.inputs.ladder
    if ladder is None or plan.split is Split.VALIDATION:
        return
    health = await run.drafter_health(plan.step + 1)
    batch = _batch(run.config, plan.num_planned)
    for drafter in ladder.drafters:
        if health.collapsed(drafter, ladder, batch):
            *_, last = health.history(drafter).values()
            run.progress.phase(
                f"drafter {drafter} has collapsed at policy version {plan.policy_version}: "
                f"{last:.0%} of its tokens are accepted; it is off the ladder"
            )


async def step_policies(run: Run, engines: Engines, plan: StepPlan) -> tuple[Policy, ...]:
    """Return the policies of all enabled techniques for a step."""
    latency = run.inputs.latency if run.config.pat.tp_degrees else None
    needs_lengths = run.config.pat.tp_degrees or run.config.specactor.races
    lengths = await _lengths(run, plan) if needs_lengths else {}
    inputs = StepInputs(
        plan=plan,
        ladder=run.inputs.ladder,
        acceptances=await known_acceptances(run, plan, known_before(run, plan.step)),
        prompt_tokens=run.inputs.mean_prompt_tokens,
        context_rates=_context_rates(run, lengths),
        to_come=tokens_to_come(run.config, lengths),
        move_model=await _move_model(run, engines, plan, latency, lengths) if latency else None,
        queue=await _queue(run, engines, plan),
    )
    return plan_policies(run.config, inputs)


async def _queue(run: Run, engines: Engines, plan: StepPlan) -> SampleQueue | None:
    """Return the queue of a training step's samples. None with another `rollout.placement`, and
    while the run does not know the times of its steps."""
    config = run.config
    if config.sample_placement != "queue" or plan.split is Split.VALIDATION:
        return None
    last = await last_known(run, plan.step)
    latency = _step_times(run, last) if last else None
    if last is None or latency is None:
        return None
    keys = [group.prompt_key for group in plan.groups]
    lengths = GroupLengths(
        keys,
        await _lengths(run, plan),
        plan.group_size,
        config.data.max_response_tokens,
        last.mean_response_tokens,
    )
    engines.queue = sample_queue(
        config,
        lengths,
        latency,
        last.speculation,
        len(engines.living),
        run.trainer.train_s,
        kv_capacity_tokens(run),
        engines.queue,
    )
    return engines.queue


def kv_capacity_tokens(run: Run) -> float:
    """Return the tokens that an engine's KV cache holds, or infinity if that is not known."""
    tp_degree, num_bytes = run.config.rollout.tp_degree, run.config.rollout.kv_cache_bytes
    if profiled := run.inputs.latency:
        return profiled.profile.kv_capacity_tokens(tp_degree)
    if num_bytes is None:
        return inf
    shape = model_shape(run.config)
    return num_bytes * min(tp_degree, shape.num_kv_heads) / shape.kv_bytes_per_token


async def _move_model(
    run: Run,
    engines: Engines,
    plan: StepPlan,
    latency: Latency,
    lengths: Mapping[str, LengthHistory],
) -> MoveModel:
    """Return the model of moves: the run's latency model, with the acceptance of history drafts in
    the last step."""
    last = None if plan.split is Split.VALIDATION else await last_known(run, plan.step)
    return MoveModel(
        latency=latency,
        costs=_costs(run, latency, engines, last),
        pools=engines.pools,
        missed_savings=engines.missed_savings,
        remaining=expected_lengths(run.config, lengths),
        prompt_tokens=_prompt_tokens(run),
        speculation=last.speculation if last else (1.0, 0),
    )


async def kv_rule(run: Run, engines: Engines, plan: StepPlan) -> MovesKV:
    """Return which requests take keys and values along when they race or migrate: those for which
    that is faster by the profile, or by the last step's measurements. None of them if the engines
    can save none."""
    if not (run.config.pat.tp_degrees or run.config.engine.moves_kv):
        return lambda *_: False
    last = None if plan.split is Split.VALIDATION else await last_known(run, plan.step)
    latency = run.inputs.latency or (measured_by(last.shares) if last else None)
    return _costs(run, latency, engines, last).moves_kv if latency else moves_long


async def predict_end(run: Run, plan: StepPlan) -> StageEnd | None:
    """Return the forecast of a step's end to show while it runs, or None if the run does not know
    the times of its steps. Validation has no earlier lengths. The engines need not wait for this.
    """
    last = None if plan.split is Split.VALIDATION else await last_known(run, plan.step)
    latency = _step_times(run, last) if last else None
    if last is None or latency is None:
        return None
    acceptances = await known_acceptances(run, plan, known_before(run, plan.step))
    lengths = await _lengths(run, plan)
    rates = _context_rates(run, lengths)
    outlook = stage_outlook(
        run.config,
        StepInputs(plan=plan, acceptances=acceptances, context_rates=rates),
        latency,
        expected_lengths(run.config, lengths),
        _prompt_tokens(run),
        last.speculation,
    )
    return StageEnd(outlook)


def _step_times(run: Run, last: RolloutBatch) -> Latency | None:
    """Return the latency model of the profile, or of the last step's measurements. None without
    either, and when it lacks the time of a drafter."""
    models = {model.name for model in run.config.specactor.draft_models}
    profiled = run.inputs.latency
    if profiled is None or run.config.specactor.head:  # No profile has a head.
        return None if models else measured_by(last.shares)
    drafters = {NGRAM, *models} if run.config.engine.speculates else models
    return profiled if drafters <= set(profiled.drafters) else None


def _context_rates(run: Run, lengths: Mapping[str, LengthHistory]) -> dict[str, float]:
    """Return the tokens by which contexts grow for each response token, by prompt. Empty without an
    environment."""
    return context_rates(list(lengths), lengths) if run.config.environment else {}


def _prompt_tokens(run: Run) -> dict[str, int]:
    return {key: len(prompt.token_ids) for key, prompt in run.inputs.prompts.items()}


async def _lengths(run: Run, plan: StepPlan) -> dict[str, LengthHistory]:
    """Return the earlier response lengths of the plan's prompts."""
    keys = [group.prompt_key for group in plan.groups]
    return await run.store("length_history", keys, known_before(run, plan.step))


def _costs(run: Run, latency: Latency, engines: Engines, last: RolloutBatch | None) -> SwitchCosts:
    """Return the costs of a switch: as measured in the last switches, or guesses before the
    first."""
    shape = model_shape(run.config)
    synced = last.sync_s if last else 0.0
    costs = SwitchCosts(
        latency=latency,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        num_kv_heads=shape.num_kv_heads,
        link_bytes_per_s=FIRST_KV_BYTES_PER_S,
        wake_s=FIRST_SWITCH_S,
        weights_s=0.0 if engines.keeps_weights else synced,
    )
    return costs.as_measured(last.switches) if last else costs


def _batch(config: TrainConfig, num_requests: int) -> int:
    """Return the number of requests of one engine at the start of a step."""
    each = -(-num_requests // config.rollout.num_engines)
    return max(1, min(each, config.rollout.max_num_seqs))
