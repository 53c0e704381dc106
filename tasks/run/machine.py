"""Whether a run fits on this machine, said before anything is started."""

from collections.abc import Sequence

from engines.gpus.placement import Wanted, place
from engines.inference.engine.arguments import CPU_KV_CACHE_BYTES
from engines.machine.cuda import require_gpus
from engines.machine.host import HostNeed, require_room
from engines.machine.memory import host_memory
from engines.pat.memory import host_footprint
from schemas.config import TrainConfig
from tasks.run.gpus import wanted_by_engines, wanted_gpus
from tasks.run.preflight import model_shape
from tasks.run.ray_cluster import names_cluster


def check_training_fits(config: TrainConfig) -> str:
    """Check that engines, drafters and trainer fit on this machine, where the run is to be here;
    what it will take, in a sentence. Raises ValueError with the arithmetic when it does not fit, or
    when the CUDA build has no GPU."""
    return _check(config, wanted_gpus(config), config.trainer.num_processes)


def check_engines_fit(config: TrainConfig) -> str:
    """Check as `check_training_fits` does, without a trainer."""
    return _check(config, wanted_by_engines(config), 0)


def _check(config: TrainConfig, wanted: Sequence[Wanted], num_trainers: int) -> str:
    if names_cluster():
        return "GPUs and memory of the cluster are counted when the run starts."
    if num_gpus := check_gpus(wanted):
        return f"Takes {sum(one.num_gpus for one in wanted)} of the {num_gpus} GPUs here."
    need = _host_need(config, num_trainers)
    require_room(need, host_memory()[0])
    return f"On CPUs, with about {need.bytes / 1e9:.1f} GB of memory ({need})."


def check_gpus(wanted: Sequence[Wanted]) -> int:
    """Number of this machine's GPUs; 0 where everything runs on CPUs, or on a cluster. Raises
    ValueError when they are too few, or when the CUDA build has none."""
    num_gpus = 0 if names_cluster() else require_gpus()
    if num_gpus:
        place(wanted, {"this machine": num_gpus})
    return num_gpus


def _host_need(config: TrainConfig, num_trainers: int) -> HostNeed:
    rollout, shape = config.rollout, model_shape(config)
    num_processes = rollout.num_engines * rollout.tp_degree
    engines = host_footprint(
        shape.weight_bytes,
        config.tp_degrees,
        rollout.kv_cache_bytes or CPU_KV_CACHE_BYTES,
        num_processes,
    )
    return HostNeed(num_processes * len(config.tp_degrees), engines, num_trainers, shape.num_params)
