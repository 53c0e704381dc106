"""Views of a stage, for policies."""

from refrain.engines.rollout.fleet import Fleet
from refrain.engines.rollout.moves import EngineView, RolloutView
from refrain.engines.rollout.stage import GenerationStage
from refrain.engines.rollout.tracked_engine import now_s, num_response_tokens


def queued_view(fleet: Fleet, stage: GenerationStage) -> RolloutView:
    """Return the view of a stage as if its engines had all their queued requests."""
    engines = (
        EngineView(
            tracked.index,
            {r.id: num_response_tokens(r) for r in stage.queues[tracked.index]},
            tp_degree=tracked.engine.tp_degree,
        )
        for tracked in fleet.base
        if tracked.index in stage.queues
    )
    return RolloutView(0.0, tuple(engines), 0, stage.num_rollouts, waiting=stage.waiting)


def stage_view(fleet: Fleet, stage: GenerationStage, later: GenerationStage | None) -> RolloutView:
    """Return the view of a stage under way. `later`: the next stage, if it is queued."""
    return RolloutView(
        elapsed_s=now_s() - min(stage.began_s, now_s()),
        engines=tuple(tracked.view() for tracked in fleet.at(stage)),
        num_finished=stage.num_finished,
        num_rollouts=stage.num_rollouts,
        num_deferrable=stage.num_deferrable if later and later.takes_deferred else 0,
        waiting=stage.waiting,
        finished=stage.finished,
        goes_on=later is not None,
        now_s=now_s(),
    )
