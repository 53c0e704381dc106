"""Check that a run fits on this machine before anything starts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from refrain.engines.gpus.placement import Wanted, place
from refrain.engines.inference.engine.arguments import CPU_KV_CACHE_BYTES
from refrain.engines.learn.checkpoint import checkpoints_dir
from refrain.engines.machine.cuda import require_gpus
from refrain.engines.machine.host import HostNeed, require_room
from refrain.engines.machine.inspect_machine import gpu_memory, room_of
from refrain.engines.machine.memory import host_memory
from refrain.engines.machine.nodes import Nodes, parse_nodes
from refrain.engines.machine.plan import Need, memory_needs, plan_disk, require_fits, undrafted
from refrain.engines.pat.memory import USABLE_SHARE, host_footprint
from refrain.engines.shared_memory import shared_memory
from refrain.schemas.config import TrainConfig
from refrain.tasks.run.gpus import wanted_by_engines, wanted_gpus
from refrain.tasks.run.model_inputs import drafter_shapes, model_shape
from refrain.tasks.run.ray_cluster import names_cluster

ON_CLUSTER = "GPUs and memory of the cluster are counted when the run starts."


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of the machine that a run needs."""

    says: str
    """A sentence about the memory."""
    needs: tuple[Need, ...] = ()
    """The need of each kind of memory (GPUs, host, disk). Empty: not known."""


def plan_training(config: TrainConfig, gpus: str | None = None) -> MemoryPlan:
    """Plan the memory of every role on this machine, or on `gpus`, for example 8xH100-80GB. On a
    cluster, Ray places the roles when the run starts.

    Raise ValueError with the arithmetic when they do not fit, or when the CUDA build finds no GPU.
    """
    wanted = wanted_gpus(config)
    if gpus is not None:
        return _on_gpus(config, wanted, parse_nodes(gpus), f"Planned for {gpus}.")
    if names_cluster():
        return MemoryPlan(ON_CLUSTER)
    if num_gpus := check_gpus(wanted):
        says, gpu_bytes = _taken(wanted, num_gpus), gpu_memory()
        if gpu_bytes is None:
            return MemoryPlan(f"{says} Their memory is not planned: nvidia-smi does not report it.")
        return _on_gpus(config, wanted, _here(config, num_gpus, gpu_bytes), says)
    if config.rollout.weight_sync == "ipc":
        raise ValueError(
            "rollout.weight_sync is ipc, but this machine has no GPU to keep weights on: set "
            "rollout.weight_sync=file"
        )
    need = _host_need(config, config.trainer.num_processes)
    disk = plan_disk(config, model_shape(config), _disk_bytes(config))
    says = _check_host(need)
    require_fits([disk])
    return MemoryPlan(says, (_need_of(need), disk))


def _on_gpus(config: TrainConfig, wanted: Sequence[Wanted], nodes: Nodes, says: str) -> MemoryPlan:
    owners = Counter(chain.from_iterable(place(wanted, nodes.free).values()))
    try:
        shape, drafters = model_shape(config), drafter_shapes(config)
    except ValueError as error:
        return MemoryPlan(f"{says} Its memory is not planned: {error}.")
    needs = memory_needs(config, shape, nodes, max(owners.values()), drafters)
    require_fits(needs)
    return MemoryPlan(" ".join((says, *undrafted(config, drafters, nodes))), needs)


def _here(config: TrainConfig, num_gpus: int, gpu_bytes: float) -> Nodes:
    return Nodes(
        num_nodes=1,
        num_gpus=num_gpus,
        gpu_bytes=gpu_bytes,
        host_bytes=host_memory()[0],
        shm_bytes=room_of(shared_memory()).free_bytes,
        disk_bytes=_disk_bytes(config),
    )


def _disk_bytes(config: TrainConfig) -> float:
    """Return the bytes for checkpoints: the free space, and the run's own checkpoints, which new
    ones replace."""
    own = (path for path in checkpoints_dir(config).rglob("*") if path.is_file())
    return room_of(config.run_dir).free_bytes + sum(path.stat().st_size for path in own)


def plan_engines(config: TrainConfig) -> MemoryPlan:
    """Plan the engines alone. Raise the errors of `plan_training`."""
    wanted = wanted_by_engines(config)
    if names_cluster():
        return MemoryPlan(ON_CLUSTER)
    if num_gpus := check_gpus(wanted):
        return MemoryPlan(_taken(wanted, num_gpus))
    return MemoryPlan(_check_host(_host_need(config, 0)))


def _taken(wanted: Sequence[Wanted], num_gpus: int) -> str:
    taken = sum(one.num_gpus for one in wanted if not one.within)
    turns = ", engines and trainer in turn" if any(one.within for one in wanted) else ""
    return f"Takes {taken} of the {num_gpus} GPUs here{turns}."


def _need_of(need: HostNeed) -> Need:
    usable = host_memory()[0] * USABLE_SHARE
    return Need("the memory of this machine", need.bytes, usable, str(need), "")


def _check_host(need: HostNeed) -> str:
    require_room(need, host_memory()[0])
    return f"On CPUs, with about {need.bytes / 1e9:.1f} GB of memory ({need})."


def check_gpus(wanted: Sequence[Wanted]) -> int:
    """Return the number of this machine's GPUs. 0: the run uses CPUs or a cluster. Raise ValueError
    when there are too few, or when the CUDA build finds none."""
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
