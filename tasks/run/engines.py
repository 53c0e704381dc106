"""A run's rollout engines: active ones, and those on standby on the same GPUs."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from refrain.engines.control.reshaping import MissedSavings
from refrain.engines.gpus.gpu_sharing import Role, Turns
from refrain.engines.gpus.placement import GpuPlacement
from refrain.engines.gpus.reservation import ReservedGpus, reserve_gpus
from refrain.engines.histopipe.sample_queue import SampleQueue
from refrain.engines.inference.drafting.drafters import Drafters
from refrain.engines.inference.engine.arguments import CPU_KV_CACHE_BYTES
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.inference.engine.vllm_engine import VLLMEngine
from refrain.engines.inference.weights.hand_over import HandOver
from refrain.engines.latency.fitted import FittedLatency
from refrain.engines.learn.trainer import TrainerGroup
from refrain.engines.machine.memory import host_memory
from refrain.engines.machine.plan import share_gpu
from refrain.engines.machine.shared_gpu import SharedGpu
from refrain.engines.pat.layouts import EngineSpec, plan_pools
from refrain.engines.pat.memory import plan_parked_weights, require_host_memory, start_share
from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.stage import Outcome
from refrain.schemas.config import EngineConfig, RolloutConfig, TrainConfig
from refrain.schemas.engine import EngineSetup
from refrain.schemas.layout import Pool
from refrain.schemas.timeline import Timeline
from refrain.tasks.run.gpus import drafter_name, engine_name, pool_name, wanted_by_engines
from refrain.tasks.run.milestones import Milestone
from refrain.tasks.run.model_inputs import model_shape
from refrain.tasks.run.ray_cluster import names_cluster

HOLD_TIMEOUT_S = 120.0
"""Seconds to wait until Ray has reserved the GPUs of a pool."""


class Engines:
    """The engines, drafters and coordinator of a run, for the task `rollout`.

    They stay in the process of the flow, because its event loop watches the engines.
    """

    # Use slots: Prefect records a flow's arguments, and looks into objects with a `__dict__`.
    __slots__ = (
        "_open_s",
        "_receivers",
        "_rolled_out_s",
        "coordinator",
        "drafters",
        "gpus",
        "keeps_weights",
        "missed_savings",
        "pools",
        "queue",
        "queued",
        "trainer_leaves",
        "turns",
    )

    def __init__(
        self,
        coordinator: Coordinator,
        drafters: Drafters,
        policy_version: int,
        pools: Sequence[Pool] = (),
        keeps_weights: bool = True,
        gpus: Sequence[int] = (),
        *,
        trainer_leaves: bool = False,
        receivers: Sequence[RayEngine] = (),
    ) -> None:
        """Make the engines of a run.

        `policy_version`: the run's current version. `pools`: engines that share GPUs. Empty without
        `pat.tp_degrees`: then each engine has its own. `keeps_weights`: whether an engine on
        standby keeps its weights. `gpus`: the engines' GPUs, if they take turns with the trainer.
        `trainer_leaves`: whether the trainer's state moves to host memory during rollouts.
        `receivers`: engines that receive weights from the trainer on their GPUs.
        """
        self.coordinator = coordinator
        self.drafters = drafters
        self.pools = pools
        self.missed_savings = MissedSavings()
        """Savings that were not taken (see `MoveModel`), since the engines began in the lowest
        layout."""
        self.keeps_weights = keeps_weights
        self.gpus = tuple(gpus)
        self.trainer_leaves = trainer_leaves
        self.queue: SampleQueue | None = None
        """Queue of the last step that had one."""
        self.turns = Turns({}, Role.ENGINES)
        self.queued = Milestone[None](policy_version, None)
        """The last step whose rollouts are queued."""
        self._receivers = tuple(receivers)
        self._rolled_out_s = 0.0
        """End of the last rollout stage, on the event loop's clock. 0: before the first."""
        self._open_s: list[float] = []
        """Beginnings of timelines that are not yet taken."""

    @property
    def living(self) -> tuple[int, ...]:
        """Engines that a plan can use."""
        return self.coordinator.living

    def hand_over(self) -> HandOver | None:
        """Return the engines that can receive weights on their GPUs now. None: all engines read
        files."""
        if not self._receivers:
            return None
        there = {one.index: one.actor for one in self._receivers if one.actor is not None}
        return HandOver(there, self._receivers[0].stall_timeout_s)

    def take_turns(self, trainer: TrainerGroup) -> None:
        """Share the GPUs with the trainer in turns. The trainer gets them first, as soon as the
        engines have started."""
        self.turns = Turns({Role.ENGINES: self.coordinator, Role.TRAINER: trainer}, Role.TRAINER)

    async def start(self) -> None:
        await asyncio.gather(self.coordinator.start(), self.drafters.start())
        if self.turns.has is Role.TRAINER:
            await self.coordinator.leave_gpus()

    def open_timeline(self) -> float:
        """Begin a timeline at the end of the last stage. Return that time of the event loop's
        clock, for `timeline`."""
        self._open_s.append(self._rolled_out_s)
        return self._rolled_out_s

    def timeline(self, outcome: Outcome, since_s: float | None = None) -> Timeline:
        """Return the timeline of a rollout stage, from the end of the stage before. Call this once
        per stage.

        `since_s`: result of `open_timeline`, for a stage in several batches: other stages may have
        ended in between.
        """
        if since_s is not None:
            self._open_s.remove(since_s)
        begin_s = (self._rolled_out_s if since_s is None else since_s) or outcome.started_s
        self._rolled_out_s = max(self._rolled_out_s, outcome.finished_s)
        kept_s = min([begin_s, *self._open_s])
        return self.coordinator.timeline(begin_s, outcome.finished_s, kept_s)


async def make_generation(
    config: TrainConfig,
    latency: FittedLatency | None,
    policy_version: int,
    placement: GpuPlacement,
    log: Callable[[str], None],
    engine_class: type[VLLMEngine] = VLLMEngine,
    learnt: Mapping[int, str] | None = None,
) -> Engines:
    """Make a run's engines and drafters. Start none.

    `log`: receives messages about dead drafters and lost engines. `engine_class`: ignored for
    engines that share GPUs. `learnt`: each engine's drafting state at the start (`Store.learnt`).
    Raise ValueError when engines of several TP degrees do not fit into memory, or when
    rollout.weight_sync is ipc and there are no GPUs.
    """
    setup = EngineSetup(
        profile_json=latency.profile.model_dump_json() if latency else None,
        exports_metrics=names_cluster(),
    )
    reserved = await _reserve(config, placement)
    shared = _shared_gpu(config, reserved)
    engine = config.engine.model_copy(
        update={
            "rollout": _beside_trainer(config, shared),
            "takes_turns": config.takes_turns,
        }
    )
    engines, pools, keeps_weights = _make_engines(
        config, engine, placement, engine_class, reserved, setup, learnt or {}
    )
    coordinator = Coordinator(
        engines,
        pools=pools,
        keep_parked_current=keeps_weights,
        log=log,
        decide_in_thread=True,
    )
    drafters = Drafters(
        engine.drafter_processes,
        engines,
        log,
        num_gpus=1 if placement.num_gpus else 0,
        nodes=[placement.node(drafter_name(i)) for i in range(len(engine.drafter_processes))],
        on_cluster=names_cluster(),
    )
    gpus = [gpu for of_part in reserved.values() for gpu in of_part.gpu_ids]
    leaves = config.takes_turns and bool(reserved) and (shared is None or shared.state_leaves)
    return Engines(
        coordinator,
        drafters,
        policy_version,
        pools,
        keeps_weights,
        gpus,
        trainer_leaves=leaves,
        receivers=_receivers(config, engines, reserved),
    )


def _receivers(
    config: TrainConfig, engines: Sequence[RayEngine], reserved: Mapping[str, ReservedGpus]
) -> list[RayEngine]:
    """Return the engines that receive weights from the trainer on their GPUs. Engines of other
    layouts have no memory for weights at that time. Raise ValueError when there are no GPUs."""
    if not config.takes_turns or config.rollout.weight_sync == "file":
        return []
    if not reserved:
        raise ValueError(
            "rollout.weight_sync is ipc, but there are no GPUs: set rollout.weight_sync=file"
        )
    return [engine for engine in engines if engine.tp_degree == config.rollout.tp_degree]


def _make_engines(
    config: TrainConfig,
    engine: EngineConfig,
    placement: GpuPlacement,
    engine_class: type[VLLMEngine],
    reserved: Mapping[str, ReservedGpus],
    setup: EngineSetup,
    learnt: Mapping[int, str],
) -> tuple[list[RayEngine], Sequence[Pool], bool]:
    """Return the engines, their pools, and whether an engine on standby keeps its weights."""
    rollout, pat = config.rollout, config.pat
    pools, specs = plan_pools(
        rollout.num_engines, rollout.tp_degree, pat.tp_degrees, pat.gpus_per_node
    )
    keeps_weights = not pools or _keeps_weights(config, reserved)
    setup = setup.model_copy(update={"keeps_weights": keeps_weights})
    own = [
        (spec, setup.model_copy(update={"learnt": learnt.get(spec.engine, "")})) for spec in specs
    ]
    if not pools:
        alone = [_alone(engine, placement, engine_class, reserved, *one) for one in own]
        return alone, (), True
    weight_bytes = model_shape(config).weight_bytes
    engines = [_pooled(engine, reserved, weight_bytes, *one) for one in own]
    return engines, pools, keeps_weights


def _alone(
    engine: EngineConfig,
    placement: GpuPlacement,
    engine_class: type[VLLMEngine],
    reserved: Mapping[str, ReservedGpus],
    spec: EngineSpec,
    setup: EngineSetup,
) -> RayEngine:
    name = engine_name(spec.engine)
    gpus = reserved.get(name)
    own_gpus = spec.tp_degree if placement.num_gpus and not gpus else 0
    setup = setup.model_copy(update={"devices": gpus.gpu_ids if gpus else ()})
    return RayEngine(spec.engine, engine, own_gpus, engine_class, gpus, placement.node(name), setup)


def _pooled(
    engine: EngineConfig,
    reserved: Mapping[str, ReservedGpus],
    weight_bytes: float,
    spec: EngineSpec,
    setup: EngineSetup,
) -> RayEngine:
    assert spec.pool is not None
    gpus = reserved.get(pool_name(spec.pool))
    changed: dict[str, float] = {"tp_degree": spec.tp_degree}
    if gpus and engine.rollout.kv_cache_bytes:
        changed["gpu_memory_utilization"] = start_share(
            weight_bytes, spec.tp_degree, engine.rollout.kv_cache_bytes, gpus.total_bytes
        )
    config = engine.model_copy(
        update={"rollout": engine.rollout.model_copy(update=changed), "pooled": True}
    )
    devices = tuple(gpus.gpu_ids[i] for i in spec.devices) if gpus else ()
    setup = setup.model_copy(update={"devices": devices})
    return RayEngine(spec.engine, config, num_gpus=0, gpus=gpus, setup=setup)


async def _reserve(config: TrainConfig, placement: GpuPlacement) -> dict[str, ReservedGpus]:
    """Let Ray reserve the GPUs that several parts of the run share. Return them by the name of the
    engine or pool."""
    if not placement.num_gpus or not (config.pat.tp_degrees or config.takes_turns):
        return {}
    wanted = wanted_by_engines(config)
    reserved = await asyncio.gather(
        *(reserve_gpus(one.num_gpus, placement.node(one.what), HOLD_TIMEOUT_S) for one in wanted)
    )
    return {one.what: gpus for one, gpus in zip(wanted, reserved, strict=True)}


def _shared_gpu(config: TrainConfig, reserved: Mapping[str, ReservedGpus]) -> SharedGpu | None:
    """Return the memory plan of a GPU that engines and trainer share. None: there is no such GPU,
    or its plan is not known. In that case, each side frees all of its memory when it leaves."""
    gpu_bytes = min((gpus.total_bytes for gpus in reserved.values()), default=0)
    if not config.takes_turns or not gpu_bytes:
        return None
    try:
        shape = model_shape(config)
    except ValueError:  # The check before the run has reported that memory is not planned.
        return None
    return share_gpu(config, shape, gpu_bytes)


def _beside_trainer(config: TrainConfig, shared: SharedGpu | None) -> RolloutConfig:
    """Return rollout settings for engines that restart while the trainer's state is on their GPUs.
    vLLM starts only if its whole share of the memory is free, so lower the share."""
    rollout = config.rollout
    if shared is None or shared.state_leaves or rollout.kv_cache_bytes is None:
        return rollout
    share = min(rollout.gpu_memory_utilization, shared.engine.bytes / shared.gpu_bytes)
    return rollout.model_copy(update={"gpu_memory_utilization": share})


def _keeps_weights(config: TrainConfig, reserved: Mapping[str, ReservedGpus]) -> bool:
    """Return whether engines on standby keep their weights. Raise ValueError when there is no
    memory for all layouts."""
    weight_bytes = model_shape(config).weight_bytes
    kv_cache_bytes = config.rollout.kv_cache_bytes
    if not reserved:
        require_host_memory(
            weight_bytes,
            config.tp_degrees,
            kv_cache_bytes or CPU_KV_CACHE_BYTES,
            config.rollout.num_engines * config.rollout.tp_degree,
            host_memory()[1],
        )
        return True
    if kv_cache_bytes is None:
        raise ValueError(
            "rollout.kv_cache_bytes is not set: engines of several TP degrees share GPUs, so none "
            "can take all free memory. Set it to the size of one process's KV cache"
        )
    gpu_bytes = min(gpus.memory_bytes for gpus in reserved.values())
    choice = plan_parked_weights(weight_bytes, config.tp_degrees, kv_cache_bytes, gpu_bytes)
    return choice == "resident"
