"""Techniques of a run, put together: which policies decide while a step is rolled out. Pure.

    config ─────────────────────────────────────────────┐
    plan, ladder, acceptances, latency model, lengths ──┴─► plan_policies ─► policies

Several TP degrees make one controller, which weighs switches, outliers and races by one latency
model. Without them each technique that is switched on decides for itself, as its paper has it.
Real runs and simulated ones ask here: what is simulated is what runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from engines.control.controller import Controller
from engines.control.effects import Effects
from engines.control.objective import FewestGpuSeconds, SoonestEnd
from engines.control.outlook import Outlook
from engines.control.proposal import MoveTechnique, Outliers, Racing
from engines.control.reshaping import WAIT_SHARES, Forgone, Reshaping
from engines.control.state import Forecaster
from engines.histopipe.migration import Migration
from engines.latency.interface import Latency
from engines.pat.costs import SwitchCosts
from engines.pat.remaining import FromHistory, Maximum, Remaining
from engines.rollout.moves import Policy
from engines.specactor.best_of_n import BestOfN, TokensToCome
from engines.specactor.ladder import Ladder, token_acceptance
from engines.specactor.reconfigure import Reconfiguration, RequestModel
from schemas.config import TrainConfig
from schemas.drafting import HISTORY, NGRAM
from schemas.layout import Pool
from schemas.rollout import DraftSetting, LengthHistory
from schemas.step import StepPlan


@dataclass(frozen=True, kw_only=True)
class MoveModel:
    """Everything that moves are compared by."""

    latency: Latency
    costs: SwitchCosts
    """Costs of a switch between the layouts of a pool."""
    pools: Sequence[Pool]
    remaining: Remaining
    prompt_tokens: Mapping[str, int]
    """Length of each prompt, by its key."""
    forgone: Forgone = field(default_factory=Forgone)
    """Savings that steps before have forgone; counted on in this one."""
    speculation: tuple[float, int] = (1.0, 0)
    """Tokens that a request drafted for from history gains in a forward pass, and drafts that the
    pass verifies, as in the step before."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Everything that is known when a step's rollouts begin."""

    plan: StepPlan
    ladder: Ladder | None = None
    """None: what drafters cost is not known."""
    acceptances: Mapping[str, float] = field(default_factory=dict)
    """Probability that a draft token is accepted, by drafter, as far as it is known."""
    prompt_tokens: float = 0.0
    """Mean length of the run's prompts."""
    to_come: TokensToCome | None = None
    """How long responses are expected to go on, each by itself; None: nothing is known."""
    move_model: MoveModel | None = None
    """None: moves cannot be compared."""


def plan_policies(config: TrainConfig, facts: StepFacts) -> tuple[Policy, ...]:
    """All that is switched on."""
    outliers = _migration(config, facts.plan)
    races = _best_of_n(config, facts)
    redrafts = _reconfiguration(config, facts)
    if not config.pat.tp_degrees or facts.move_model is None:
        return tuple(policy for policy in (outliers, redrafts, races) if policy)
    controller = _controller(config, facts, facts.move_model, outliers, races)
    # Whatever else is decided, a request is drafted for as is best for itself.
    return (controller, redrafts) if redrafts else (controller,)


def expected_lengths(config: TrainConfig, lengths: Mapping[str, LengthHistory]) -> Remaining:
    """How long responses are taken to go on; `lengths`: of each prompt in its last epoch."""
    max_tokens = config.data.max_response_tokens
    if config.pat.lengths == "maximum":
        return Maximum(max_tokens)
    return FromHistory(lengths, max_tokens, group_size=config.rollout.group_size)


def tokens_to_come(
    config: TrainConfig, lengths: Mapping[str, LengthHistory]
) -> TokensToCome | None:
    """Expectation of each response by itself; `lengths`: likewise."""
    if not lengths:
        return None
    max_tokens = config.data.max_response_tokens
    return FromHistory(lengths, max_tokens, group_size=config.rollout.group_size).medians


def draft_setting(
    config: TrainConfig, drafter: str, window: int | None = None
) -> DraftSetting | None:
    """How this drafter drafts for a request; None for the history, whose windows are its own."""
    specactor = config.specactor
    if drafter == HISTORY:
        return None
    is_model = drafter in {model.name for model in specactor.draft_models}
    coupled = specactor.coupled or not is_model
    return DraftSetting(drafter, min(window or specactor.window, config.engine.max_draft), coupled)


def _controller(
    config: TrainConfig,
    facts: StepFacts,
    model: MoveModel,
    outliers: Migration | None,
    races: BestOfN | None,
) -> Controller:
    objective = FewestGpuSeconds() if config.mode == "pipelined" else SoonestEnd()
    wait_shares = WAIT_SHARES if config.pat.waits else ()
    reshaping = Reshaping(objective, wait_shares, model.forgone)
    techniques: list[MoveTechnique] = [reshaping]
    if outliers:
        techniques.append(Outliers(outliers))
    if races:
        techniques.append(Racing(races))
    pools = {pool.index: pool for pool in model.pools}
    outlook = _outlook(config, facts, model)
    return Controller(
        techniques,
        outlook,
        Effects(model.latency, pools, model.costs),
        objective,
        shares_engines=bool(races) and config.mode == "sync",
        opening=reshaping if _opens(config) else None,
    )


def _opens(config: TrainConfig) -> bool:
    """Whether a step begins in the best layout: not where engines go from step to step one by one,
    nor where weights wait on the GPUs for those of the lowest TP degree."""
    handed = config.takes_turns and config.rollout.weights == "ipc"
    return config.pat.opening == "best" and config.mode == "sync" and not handed


def _outlook(config: TrainConfig, facts: StepFacts, model: MoveModel) -> Outlook:
    tokens_per_pass, window = model.speculation
    accepted, drafting = dict(facts.acceptances), facts.plan.drafting
    if window:
        accepted[HISTORY] = token_acceptance(window, _rate(window, tokens_per_pass))
    return Outlook(
        Forecaster(model.latency, config.rollout.max_num_seqs),
        model.remaining,
        model.prompt_tokens,
        expected_acceptance=accepted,
        prompt_acceptance=_prompt_acceptance(facts.plan, window),
        default_drafting=drafting or (DraftSetting(HISTORY, window) if window else None),
    )


def _prompt_acceptance(plan: StepPlan, window: int) -> dict[str, float]:
    """Acceptance of drafts from history by prompt. Rates are rounded to hundredths, so that most
    are looked up; nothing where prompts are not told apart."""
    gained = plan.tokens_per_pass if window else {}
    if len(set(gained.values())) < 2:
        return {}
    return {
        key: token_acceptance(window, round(_rate(window, tokens), 2))
        for key, tokens in gained.items()
    }


def _rate(window: int, tokens_per_pass: float) -> float:
    """Accepted over drafted tokens where a pass that verifies so many gains that much."""
    return min(1.0, (tokens_per_pass - 1.0) / window)


def _migration(config: TrainConfig, plan: StepPlan) -> Migration | None:
    """HistoPipe's, where prompts are ranked."""
    histopipe = config.histopipe
    if not plan.ranking_groups or not histopipe.migrate:
        return None
    return Migration(plan, last_share=histopipe.last_share, defer_share=histopipe.defer_share)


def _best_of_n(config: TrainConfig, facts: StepFacts) -> BestOfN | None:
    """Algorithm 3 of SpecActor, where there are draft models."""
    specactor = config.specactor
    if not specactor.races:
        return None
    return BestOfN(
        _race_settings(config, facts),
        initial=facts.plan.drafting.drafter if facts.plan.drafting else HISTORY,
        max_batch=specactor.max_race_batch,
        to_come=facts.to_come,
    )


def _race_settings(config: TrainConfig, facts: StepFacts) -> list[DraftSetting]:
    """Drafters to race with, each with the window that is the best by the ladder for a raced batch:
    the fastest first, then those that were not measured, with the window for what the others have
    on average. Of these, and without a ladder or any measurement, where each is as it is
    configured: the history, draft models, n-grams."""
    specactor, ladder, known = config.specactor, facts.ladder, facts.acceptances
    history = [HISTORY] if config.drafting.enabled else []
    names = [*history, *(model.name for model in specactor.draft_models), NGRAM]
    settings = [_raced_as(config, name) for name in names]
    if ladder is None or not known:
        return settings
    model, mean = RequestModel(ladder, specactor.coupled), fmean(known.values())
    speeds: dict[DraftSetting, float] = {}
    for setting in settings:
        drafter = setting.drafter
        at = known.get(drafter, mean), specactor.max_race_batch
        if drafter in ladder.drafters:
            setting = model.best_setting(drafter, *at, coupled=setting.coupled)
        speeds[setting] = model.tokens_per_s(setting, *at) if drafter in known else 0.0
    return sorted(speeds, key=speeds.__getitem__, reverse=True)


def _raced_as(config: TrainConfig, drafter: str) -> DraftSetting:
    """Setting as it is configured; the history's own windows are at most the one that is given."""
    return draft_setting(config, drafter) or DraftSetting(drafter, config.drafting.max_draft)


def _reconfiguration(config: TrainConfig, facts: StepFacts) -> Reconfiguration | None:
    """Algorithm 2 of SpecActor, where there are draft models and a ladder."""
    specactor = config.specactor
    if not specactor.draft_models or facts.ladder is None or not specactor.reconfigure_tokens:
        return None
    return Reconfiguration(
        RequestModel(facts.ladder, specactor.coupled),
        every_tokens=specactor.reconfigure_tokens,
        prompt_tokens=facts.prompt_tokens,
    )
