"""Builds the policies that decide while a step is rolled out. Pure.

    config ─────────────────────────────────────────────┐
    plan, ladder, acceptances, latency model, lengths ──┴─► plan_policies ─► policies

Each technique that is on decides by itself. The controller of TP switches comes first, so the
others see its pools as it left them. Real and simulated runs both call `plan_policies`, so a
simulation shows what a run does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from refrain.engines.control.controller import Controller
from refrain.engines.control.outlook import Outlook
from refrain.engines.control.reshaping import MissedSavings, Reshaping
from refrain.engines.control.state import Forecaster
from refrain.engines.histopipe.group_lengths import GroupLengths
from refrain.engines.histopipe.migration import DEFER_SHARE, Migration
from refrain.engines.histopipe.sample_queue import EngineLimits, SampleQueue
from refrain.engines.histopipe.step_end import StepPace, TokenTimes
from refrain.engines.latency.drafted import DraftedLatency
from refrain.engines.latency.interface import Latency
from refrain.engines.pat.costs import SwitchCosts
from refrain.engines.pat.remaining import FromHistory, Remaining
from refrain.engines.rollout.moves import Move, Policy, RolloutView
from refrain.engines.specactor.best_of_n import BestOfN, TokensToCome
from refrain.engines.specactor.ladder import Ladder, token_acceptance
from refrain.engines.specactor.reconfigure import Reconfiguration
from refrain.schemas.config import TrainConfig
from refrain.schemas.drafting import HEAD, HISTORY, NGRAM
from refrain.schemas.layout import Pool
from refrain.schemas.rollout import DraftSetting, LengthHistory
from refrain.schemas.step import StepPlan

MAX_RACE_BATCH = 8
"""Responses that one engine races at the same time: few, so that each is fast."""
RECONFIGURE_TOKENS = 1000
"""Tokens between two choices of a response's window: its acceptance changes little in fewer."""


@dataclass(frozen=True, kw_only=True)
class MoveModel:
    """The models that switches are decided with."""

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
    context_rates: Mapping[str, float] = field(default_factory=dict)
    """Tokens by which a context grows for each response token, by prompt. 1 if missing."""
    to_come: TokensToCome | None = None
    """Expected remaining tokens of each response. None: unknown."""
    move_model: MoveModel | None = None
    """None: switches cannot be predicted, and there is no controller."""
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
    policies = (
        _controller(config, inputs),
        _migration(config, inputs.plan),
        _reconfiguration(config, inputs),
        _best_of_n(config, inputs),
    )
    return tuple(policy for policy in policies if policy)


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


def expected_lengths(config: TrainConfig, lengths: Mapping[str, LengthHistory]) -> FromHistory:
    """Return the estimate of remaining tokens. `lengths`: last epoch's lengths, by prompt."""
    max_tokens = config.data.max_response_tokens
    return FromHistory(lengths, max_tokens, group_size=config.rollout.group_size)


def tokens_to_come(
    config: TrainConfig, lengths: Mapping[str, LengthHistory]
) -> TokensToCome | None:
    """Return the estimate for single responses, or None without `lengths` (as above)."""
    return expected_lengths(config, lengths).medians if lengths else None


def draft_setting(
    config: TrainConfig, drafter: str, window: int | None = None
) -> DraftSetting | None:
    """Return the drafter's setting for a request. None for history, which has its own windows. With
    a draft head, the head drafts beside it."""
    specactor = config.specactor
    if drafter == HISTORY and specactor.head is None:
        return None
    drafter = HEAD if drafter == HISTORY else drafter
    is_model = drafter in {model.name for model in specactor.draft_models}
    window = min(window or specactor.window, config.engine.max_draft)
    return DraftSetting(drafter, window, coupled=not is_model)


def _controller(config: TrainConfig, inputs: StepInputs) -> Controller | None:
    """Return the controller of TP switches, or None if there is one TP degree."""
    model = inputs.move_model
    if not config.pat.tp_degrees or model is None:
        return None
    pools = {pool.index: pool for pool in model.pools}
    idles = not config.staleness
    return Controller(
        Reshaping(model.costs, pools, idles, missed_savings=model.missed_savings),
        stage_outlook(
            config, inputs, model.latency, model.remaining, model.prompt_tokens, model.speculation
        ),
        opens=model.opens and _opens(config),
        shares_engines=config.specactor.races and idles,
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
        context_rates=inputs.context_rates,
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
