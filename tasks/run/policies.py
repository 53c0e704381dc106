"""What may be changed while a step is rolled out, and who decides.

With `pat.tp_degrees` one controller weighs all moves by the run's profile. Else each technique that
is switched on decides for itself, as its paper has it.
"""

from engines.control.controller import Controller
from engines.control.effects import Effects
from engines.control.moving import Outliers, Racing
from engines.control.objective import FewestGpuSeconds, SoonestEnd
from engines.control.outlook import Outlook
from engines.control.proposal import Technique
from engines.control.reshaping import Reshaping
from engines.control.state import Forecaster
from engines.histopipe.migration import Migration
from engines.latency.interface import Latency
from engines.pat.costs import SwitchCosts
from engines.pat.remaining import FromHistory, Maximum, Remaining
from engines.rollout.moves import Policy
from schemas.drafting import HISTORY
from schemas.rollout import DraftSetting, LengthHistory
from schemas.step import StepPlan
from tasks.history import known_before
from tasks.run.live import Run
from tasks.run.preflight import model_shape
from tasks.run.speculation import best_of_n, reconfiguration


async def step_policies(run: Run, plan: StepPlan) -> tuple[Policy, ...]:
    """Of all techniques that are switched on."""
    outliers, redrafts, races = _migration(run, plan), reconfiguration(run), best_of_n(run, plan)
    latency = run.inputs.latency if run.config.pat.tp_degrees else None
    if latency is None:
        return tuple(policy for policy in (outliers, redrafts, races) if policy)
    pipelined = run.config.mode == "pipelined"
    objective = FewestGpuSeconds() if pipelined else SoonestEnd()
    techniques: list[Technique] = [Reshaping(objective=objective)]
    if outliers:
        techniques.append(Outliers(outliers))
    if races:
        techniques.append(Racing(races))
    pools = {pool.index: pool for pool in run.engines.pools}
    controller = Controller(
        techniques,
        await _outlook(run, plan, latency),
        Effects(latency, pools, _costs(run, latency)),
        objective,
    )
    # Whatever else is decided, a request is drafted for as is best for itself.
    return (controller, redrafts) if redrafts else (controller,)


def _migration(run: Run, plan: StepPlan) -> Migration | None:
    """HistoPipe's."""
    histopipe = run.config.histopipe
    if not plan.ranking_groups or not histopipe.migrate:
        return None
    return Migration(plan, last_share=histopipe.last_share, defer_share=histopipe.defer_share)


async def _outlook(run: Run, plan: StepPlan, latency: Latency) -> Outlook:
    """With drafts from history as they were accepted in the last step."""
    tokens_per_pass, window = run.last_batch.speculation if run.last_batch else (1.0, 0)
    drafting = plan.drafting or (DraftSetting(HISTORY, window) if window else None)
    accepted = {HISTORY: min(1.0, (tokens_per_pass - 1.0) / window)} if window else {}
    return Outlook(
        Forecaster(latency, run.config.rollout.max_num_seqs),
        await _remaining(run, plan),
        {key: len(prompt.token_ids) for key, prompt in run.inputs.prompts.items()},
        expected_acceptance=accepted,
        default_drafting=drafting,
    )


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
    return FromHistory(lengths, max_tokens, group_size=config.rollout.group_size, steady=True)


def _costs(run: Run, latency: Latency) -> SwitchCosts:
    pat, shape = run.config.pat, model_shape(run.config)
    synced = run.last_batch.sync_s if run.last_batch else 0.0
    return SwitchCosts(
        latency=latency,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        num_kv_heads=shape.num_kv_heads,
        link_bytes_per_s=pat.kv_bytes_per_s,
        wake_s=pat.switch_s,
        weights_s=0.0 if run.engines.keeps_weights else synced,
        kv=pat.kv,
    )
