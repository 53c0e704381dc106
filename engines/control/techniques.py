"""Builds the policies that decide while a step is rolled out. Pure.

    config ─────────────────────────────────────────────┐
    plan, ladder, acceptances, latency model, lengths ──┴─► plan_policies ─► policies

With several TP degrees, one controller compares reshapes, migrations and races by one latency
model. Without them each technique that is on decides by itself, as in its paper. Real and simulated
runs both call `plan_policies`, so a simulation shows what a run does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from engines.control.controller import Controller
from engines.control.effects import Effects
from engines.control.objective import FewestGpuSeconds, SoonestEnd
from engines.control.outlook import Outlook
from engines.control.proposal import MoveTechnique, Outliers, Racing
from engines.control.reshaping import WAIT_SHARES, MissedSavings, Reshaping
from engines.control.state import Forecaster
from engines.histopipe.group_lengths import GroupLengths
from engines.histopipe.migration import DEFER_SHARE, Migration
from engines.histopipe.sample_queue import EngineLimits, SampleQueue
from engines.histopipe.step_end import StepPace, TokenTimes
from engines.latency.drafted import DraftedLatency
from engines.latency.interface import Latency
from engines.pat.costs import SwitchCosts
from engines.pat.remaining import FromHistory, Remaining
from engines.rollout.moves import Move, Policy, RolloutView
from engines.specactor.best_of_n import BestOfN, TokensToCome
from engines.specactor.ladder import Ladder, token_acceptance
from engines.specactor.reconfigure import Reconfiguration
from schemas.config import TrainConfig
from schemas.drafting import HISTORY, NGRAM
from schemas.layout import Pool
from schemas.rollout import DraftSetting, LengthHistory
from schemas.step import StepPlan

MAX_RACE_BATCH = 8
"""Responses that one engine races at the same time: few, so that each is fast."""
RECONFIGURE_TOKENS = 1000
"""Tokens between two choices of a response's window: its acceptance changes little in fewer."""


@dataclass(frozen=True, kw_only=True)
class MoveModel:
    """The models that moves are compared with."""

    latency: Latency
    costs: SwitchCosts
    """Costs of a switch between two layouts of a pool."""
    pools: Sequence[Pool]
    remaining: Remaining
    prompt_tokens: Mapping[str, int]
    """Prompt length in tokens, by prompt key."""
    missed_savings: MissedSavings = field(default_factory=MissedSavings)
    """Savings that earlier steps have missed. This step adds to them."""
    speculation: tuple[float, int] = (1.0, 0)
    """Tokens per forward pass and draft tokens verified per pass, for a request that is drafted
    from history. Measured in the step before."""
    opens: bool = True
    """Off: begin in the lowest TP degree, for comparison."""


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """Facts known when a step's rollouts begin."""

    plan: StepPlan
    ladder: Ladder | None = None
    """Costs of drafters. None: unknown."""
    acceptances: Mapping[str, float] = field(default_factory=dict)
    """Probability that a draft token is accepted, by drafter. Unknown drafters are missing."""
    prompt_tokens: float = 0.0
    """Mean prompt length of the run."""
    to_come: TokensToCome | None = None
    """Expected remaining tokens of each response. None: unknown."""
    move_model: MoveModel | None = None
    """None: moves cannot be compared, and there is no controller."""
    queue: SampleQueue | None = None
    """Queue of the step's samples. None: they are placed before the step begins."""


@dataclass(frozen=True, slots=True)
class OnceStarted:
    """A policy that decides once no sample waits in the queue: before, no engine is free."""

    policy: Policy

    def decide(self, view: RolloutView) -> Sequence[Move]:
        return () if view.waiting else self.policy.decide(view)


def plan_policies(config: TrainConfig, inputs: StepInputs) -> tuple[Policy, ...]:
    """Return the policies of all techniques that are switched on."""
    moving = _moving(config, inputs)
    if inputs.queue is None:
        return moving
    return (inputs.queue, *map(OnceStarted, moving))


def _moving(config: TrainConfig, inputs: StepInputs) -> tuple[Policy, ...]:
    outliers = _migration(config, inputs.plan)
    races = _best_of_n(config, inputs)
    redrafts = _reconfiguration(config, inputs)
    if not config.pat.tp_degrees or inputs.move_model is None:
        return tuple(policy for policy in (outliers, redrafts, races) if policy)
    controller = _controller(config, inputs, inputs.move_model, outliers, races)
    # Redrafting needs no controller: each request gets the drafting that is best for itself.
    return (controller, redrafts) if redrafts else (controller,)


def sample_queue(
    config: TrainConfig,
    lengths: GroupLengths,
    latency: Latency,
    speculation: tuple[float, int],
    num_engines: int,
    train_s: float,
    max_context_tokens: float,
    before: SampleQueue | None,
) -> SampleQueue:
    """Return the queue of a step. `speculation`: as in `MoveModel`. `train_s`: expected seconds of
    training. `max_context_tokens`: tokens that an engine's KV cache holds. `before`: queue of the
    step before."""
    tp_degree = config.rollout.tp_degree
    decoding = DraftedLatency(latency, *speculation)
    times = TokenTimes(decoding, tp_degree, config.rollout.max_num_seqs)
    return SampleQueue(
        lengths,
        EngineLimits(decoding, times, tp_degree, max_context_tokens),
        StepPace(times, num_engines, config.staleness, train_s),
        before,
    )


def expected_lengths(config: TrainConfig, lengths: Mapping[str, LengthHistory]) -> Remaining:
    """Return the estimate of remaining tokens. `lengths`: last epoch's lengths, by prompt."""
    max_tokens = config.data.max_response_tokens
    return FromHistory(lengths, max_tokens, group_size=config.rollout.group_size)


def tokens_to_come(
    config: TrainConfig, lengths: Mapping[str, LengthHistory]
) -> TokensToCome | None:
    """Return the estimate for single responses, or None without `lengths` (as above)."""
    if not lengths:
        return None
    max_tokens = config.data.max_response_tokens
    return FromHistory(lengths, max_tokens, group_size=config.rollout.group_size).medians


def draft_setting(
    config: TrainConfig, drafter: str, window: int | None = None
) -> DraftSetting | None:
    """Return the drafter's setting for a request. None for history, which has its own windows."""
    specactor = config.specactor
    if drafter == HISTORY:
        return None
    is_model = drafter in {model.name for model in specactor.draft_models}
    window = min(window or specactor.window, config.engine.max_draft)
    return DraftSetting(drafter, window, coupled=not is_model)


def _controller(
    config: TrainConfig,
    inputs: StepInputs,
    model: MoveModel,
    outliers: Migration | None,
    races: BestOfN | None,
) -> Controller:
    objective = FewestGpuSeconds() if config.staleness else SoonestEnd()
    reshaping = Reshaping(objective, WAIT_SHARES, model.missed_savings)
    techniques: list[MoveTechnique] = [reshaping]
    if outliers:
        techniques.append(Outliers(outliers))
    if races:
        techniques.append(Racing(races))
    pools = {pool.index: pool for pool in model.pools}
    outlook = stage_outlook(
        config, inputs, model.latency, model.remaining, model.prompt_tokens, model.speculation
    )
    return Controller(
        techniques,
        outlook,
        Effects(model.latency, pools, model.costs),
        objective,
        shares_engines=bool(races) and not config.staleness,
        opening=reshaping if model.opens and _opens(config) else None,
    )


def _opens(config: TrainConfig) -> bool:
    """Return whether a step may begin in the best layout.

    Not in `pipelined` mode, where engines start the next step one by one. And not when the trainer
    leaves the weights on the GPUs for the engines of the lowest TP degree.
    """
    handed = config.takes_turns and config.rollout.weight_sync == "ipc"
    return not config.staleness and not handed


def stage_outlook(
    config: TrainConfig,
    inputs: StepInputs,
    latency: Latency,
    remaining: Remaining,
    prompt_tokens: Mapping[str, int],
    speculation: tuple[float, int],
) -> Outlook:
    """Return the forecast of a stage. The last arguments are fields of `MoveModel`."""
    tokens_per_pass, window = speculation
    accepted, drafting = dict(inputs.acceptances), inputs.plan.drafting
    if window:
        accepted[HISTORY] = token_acceptance(window, _rate(window, tokens_per_pass))
    return Outlook(
        Forecaster(latency, config.rollout.max_num_seqs),
        remaining,
        prompt_tokens,
        expected_acceptance=accepted,
        prompt_acceptance=_prompt_acceptance(inputs.plan, window),
        default_drafting=drafting or (DraftSetting(HISTORY, window) if window else None),
    )


def _prompt_acceptance(plan: StepPlan, window: int) -> dict[str, float]:
    """Return the acceptance of drafts from history by prompt. Empty if all prompts have the same.
    Rates are rounded to two digits, so that most lookups hit the cache."""
    gained = plan.tokens_per_pass if window else {}
    if len(set(gained.values())) < 2:
        return {}
    return {
        key: token_acceptance(window, round(_rate(window, tokens), 2))
        for key, tokens in gained.items()
    }


def _rate(window: int, tokens_per_pass: float) -> float:
    """Return accepted over drafted tokens. `window`: draft tokens that a pass verifies."""
    return min(1.0, (tokens_per_pass - 1.0) / window)


def _migration(config: TrainConfig, plan: StepPlan) -> Migration | None:
    """Return HistoPipe's migration, or None if it is off or prompts are not ranked."""
    last_share = config.histopipe.last_share
    if not plan.ranking_groups or not last_share:
        return None
    return Migration(plan, last_share=last_share, defer_share=DEFER_SHARE)


def _best_of_n(config: TrainConfig, inputs: StepInputs) -> BestOfN | None:
    """Return Algorithm 3 of SpecActor, or None if races are off."""
    specactor = config.specactor
    if not specactor.races:
        return None
    return BestOfN(
        _race_settings(config, inputs),
        initial=inputs.plan.drafting.drafter if inputs.plan.drafting else HISTORY,
        max_batch=MAX_RACE_BATCH,
        to_come=inputs.to_come,
    )


def _race_settings(config: TrainConfig, inputs: StepInputs) -> list[DraftSetting]:
    """Return the drafters to race with, the fastest first.

    For a drafter in the ladder, the window is the best one for a raced batch. A drafter without a
    measured acceptance gets the window for the mean acceptance, and comes after the measured ones.
    Ties, and runs without a ladder or acceptances, keep this order: history, draft models, n-grams.
    Without a ladder or acceptances, windows are the configured ones.
    """
    specactor, ladder, known = config.specactor, inputs.ladder, inputs.acceptances
    history = [HISTORY] if config.drafting.enabled else []
    names = [*history, *(model.name for model in specactor.draft_models), NGRAM]
    settings = [_raced_as(config, name) for name in names]
    if ladder is None or not known:
        return settings
    mean = fmean(known.values())
    speeds: dict[DraftSetting, float] = {}
    for setting in settings:
        drafter = setting.drafter
        at = known.get(drafter, mean), MAX_RACE_BATCH
        if drafter in ladder.drafters:
            setting = ladder.best_setting(drafter, *at)
        speeds[setting] = ladder.pace(setting, *at).tokens_per_s if drafter in known else 0.0
    return sorted(speeds, key=speeds.__getitem__, reverse=True)


def _raced_as(config: TrainConfig, drafter: str) -> DraftSetting:
    """Return the configured setting. History may draft up to `drafting.max_draft` tokens."""
    return draft_setting(config, drafter) or DraftSetting(drafter, config.drafting.max_draft)


def _reconfiguration(config: TrainConfig, inputs: StepInputs) -> Reconfiguration | None:
    """Return Algorithm 2 of SpecActor, or None without draft models or a ladder."""
    if not config.specactor.draft_models or inputs.ladder is None:
        return None
    return Reconfiguration(
        inputs.ladder, every_tokens=RECONFIGURE_TOKENS, prompt_tokens=inputs.prompt_tokens
    )
