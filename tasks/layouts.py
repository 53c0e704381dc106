"""The rollout engines of a run: those that begin its steps, and those that wait on the same GPUs."""

from collections.abc import Mapping, Sequence

from engines.latency.model_shape import ModelShape
from engines.pat.costs import SwitchCosts
from engines.pat.layouts import EngineSpec, plan_pools
from engines.pat.remaining import FromHistory, Maximum, Remaining
from engines.pat.switch import Switching
from engines.rollout.gpus import HeldGpus, devices, hold_gpus
from engines.rollout.moves import Policy
from engines.rollout.ray_engine import RayEngine
from schemas.config import EngineConfig, TrainConfig
from schemas.layout import Pool
from schemas.rollout import LengthHistory
from schemas.step import StepPlan
from tasks.run import Run


async def make_engines(
    config: TrainConfig, engine: EngineConfig, num_gpus: int
) -> tuple[list[RayEngine], tuple[Pool, ...]]:
    """Not started yet. Without `pat.tp_degrees` each has GPUs of its own, and there is no pool."""
    rollout, pat = config.rollout, config.pat
    if not pat.tp_degrees:
        own_gpus = rollout.tp_degree if num_gpus else 0
        return [RayEngine(i, engine, own_gpus) for i in range(rollout.num_engines)], ()
    pools, specs = plan_pools(
        rollout.num_engines, rollout.tp_degree, pat.tp_degrees, pat.gpus_per_node
    )
    return [RayEngine(spec.engine, _at(engine, spec), 0) for spec in specs], pools


def _at(engine: EngineConfig, spec: EngineSpec) -> EngineConfig:
    rollout = engine.rollout.model_copy(update={"tp_degree": spec.tp_degree})
    return engine.model_copy(update={"rollout": rollout, "pooled": True})
