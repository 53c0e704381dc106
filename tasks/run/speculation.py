"""Who drafts for a step's responses, and what may change while they are rolled out."""

from dataclasses import replace

from engines.specactor.best_of_n import BestOfN
from engines.specactor.health import DrafterHealth
from engines.specactor.ladder import Ladder, choose_drafter
from engines.specactor.planner import Cluster, ExecutionPlan, plan_decoupled
from engines.specactor.reconfigure import Reconfiguration, RequestModel
from schemas.config import TrainConfig
from schemas.drafting import HISTORY
from schemas.rollout import DraftSetting, Split
from schemas.step import StepPlan
from tasks.run.live import Run


def choose_drafting(run: Run, num_requests: int) -> DraftSetting | None:
    """How a step's requests begin to be drafted for; None: as engines do by themselves, from
    history. With a draft ladder, the drafter that was the best in the last steps."""
    specactor, ladder = run.config.specactor, run.inputs.ladder
    if ladder is None or specactor.drafter != HISTORY:
        return _setting(run.config, specactor.drafter)
    batch = _batch(run.config, num_requests)
    acceptances = run.health.acceptances(ladder, batch)
    chosen = choose_drafter(ladder, acceptances, batch)
    if chosen is None:
        return None
    setting = _setting(run.config, chosen.drafter, chosen.window)
    if setting is None or setting.coupled:
        return setting
    plan = plan_decoupled(
        _cluster(run.config, ladder, num_requests),
        ladder.latency,
        chosen.drafter,
        acceptances[chosen.drafter],
        max_window=ladder.max_window,
    )
    return replace(setting, window=plan.window)


def choose_trials(run: Run, step: int, num_requests: int) -> dict[str, int]:
    """Requests of a step to try each drafter on that is not used, or that has collapsed."""
    ladder = run.inputs.ladder
    if ladder is None:
        return {}
    return run.health.trials(step, ladder, _batch(run.config, num_requests), num_requests)


def settings_of(run: Run, plan: StepPlan) -> list[DraftSetting | None]:
    """How each of a plan's requests begins to be drafted for, in the plan's order."""
    tried = [
        _setting(run.config, drafter)
        for drafter, num_requests in plan.trials.items()
        for _ in range(num_requests)
    ]
    return [*tried, *[plan.drafting] * plan.num_planned][: plan.num_planned]


def reconfiguration(run: Run) -> Reconfiguration | None:
    """Algorithm 2 of SpecActor, where there are draft models and a ladder."""
    specactor, ladder = run.config.specactor, run.inputs.ladder
    if not specactor.draft_models or ladder is None or not specactor.reconfigure_tokens:
        return None
    model = _request_model(run.config, ladder)
    return Reconfiguration(model, every_tokens=specactor.reconfigure_tokens)


def best_of_n(run: Run, plan: StepPlan) -> BestOfN | None:
    """Algorithm 3 of SpecActor, where there are draft models."""
    specactor = run.config.specactor
    if not specactor.draft_models or not specactor.race:
        return None
    own = (HISTORY,) if run.config.drafting.enabled else ()
    methods = [_setting(run.config, drafter) for drafter in (*specactor.drafters, *own)]
    return BestOfN(
        [method for method in methods if method],
        initial=plan.drafting.drafter if plan.drafting else HISTORY,
        max_batch=specactor.max_race_batch,
    )


async def note_acceptance(run: Run, plan: StepPlan) -> None:
    """Take in how often each drafter was right in a step; tell when one has collapsed."""
    ladder = run.inputs.ladder
    if ladder is None or plan.split is Split.VALIDATION:
        return
    await run.note_drafts(plan.step)
    batch = _batch(run.config, plan.num_planned)
    for drafter in collapsed(run.health, ladder, batch):
        run.progress.phase(
            f"drafter {drafter} has collapsed at policy version {plan.policy_version}: "
            f"{_last(run.health, drafter):.0%} of its tokens are right; it is off the ladder"
        )


def collapsed(health: DrafterHealth, ladder: Ladder, batch: int) -> list[str]:
    return [drafter for drafter in ladder.drafters if health.collapsed(drafter, ladder, batch)]


def _last(health: DrafterHealth, drafter: str) -> float:
    return list(health.history(drafter).values())[-1]


def _setting(config: TrainConfig, drafter: str, window: int | None = None) -> DraftSetting | None:
    """None for the history, whose windows are its own."""
    specactor = config.specactor
    if drafter == HISTORY:
        return None
    is_model = drafter in {model.name for model in specactor.draft_models}
    coupled = specactor.coupled or not is_model
    return DraftSetting(drafter, min(window or specactor.window, config.engine.max_draft), coupled)


def _batch(config: TrainConfig, num_requests: int) -> int:
    """Requests of one engine at the start of a step."""
    each = -(-num_requests // config.rollout.num_engines)
    return max(1, min(each, config.rollout.max_num_seqs))


def _cluster(config: TrainConfig, ladder: Ladder, num_requests: int) -> Cluster:
    """What Algorithm 1 plans for: the window is taken from its plan, the GPUs are as they are."""
    tp_degree = config.rollout.tp_degree
    num_gpus = config.rollout.num_engines * tp_degree + len(config.engine.drafter_processes)
    return Cluster(max(1, num_requests), num_gpus, (tp_degree,), ladder.context_tokens_each)


def _request_model(config: TrainConfig, ladder: Ladder) -> RequestModel:
    drafter_gpus = 0 if config.specactor.coupled else 1
    plan = ExecutionPlan(drafter_gpus, config.rollout.tp_degree, config.specactor.window, 0.0)
    return RequestModel(
        plan, ladder.latency, ladder.context_tokens_each, max_window=config.engine.max_draft
    )
