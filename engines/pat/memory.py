"""Is there room for engines that wait on GPUs in another layout? Pure.

A GPU has a process of each layout, one of them at work (T: its TP degree, W: bytes of all weights):

    resident   sum over layouts of W / T  + KV cache of one + overhead of each process
    reloaded   largest W / T              + KV cache of one + overhead of each process

On a CPU nothing is given back by parking: every process keeps its weights and KV cache, and all
share the host's memory.

Deviation: PAT has one engine whose weights are resharded in place (4.3). It needs no room for
further layouts but 2.5 GB during a switch (5.4), and a second or so per switch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ParkedWeights = Literal["auto", "resident", "reloaded"]

CONTEXT_BYTES = 0.5e9
"""Assumed for the CUDA context of a process and the code that it has loaded."""
NCCL_BYTES = 0.3e9
"""Assumed for the buffers of its communication groups."""
GRAPH_BYTES = 0.4e9
"""Assumed for its captured graphs, which vLLM keeps while it sleeps."""
ACTIVATION_BYTES = 2.8e9
"""Assumed for activations and logits of a step of 8,192 tokens, and what torch keeps of them."""
PARKED_BYTES = CONTEXT_BYTES + NCCL_BYTES + GRAPH_BYTES
"""Bytes of a process that waits, beside weights."""
WORKING_BYTES = PARKED_BYTES + ACTIVATION_BYTES
"""Bytes of a process at work, beside weights and KV cache."""
CPU_PROCESS_BYTES = 0.6e9
"""Memory of an engine's process on a CPU beside weights and KV cache, as small ones take it."""
USABLE_SHARE = 0.95
"""Share of a GPU's or host's memory that may be planned with."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one GPU, or of a CPU host."""

    weights_bytes: float
    kv_cache_bytes: float
    process_bytes: float

    @property
    def bytes(self) -> float:
        return self.weights_bytes + self.kv_cache_bytes + self.process_bytes

    def __str__(self) -> str:
        return (
            f"{_gb(self.weights_bytes)} of weights, {_gb(self.kv_cache_bytes)} of KV cache and "
            f"{_gb(self.process_bytes)} of processes"
        )


def gpu_footprint(
    weight_bytes: float, tp_degrees: Sequence[int], kv_cache_bytes: float, *, resident: bool
) -> Footprint:
    """Memory of a GPU with a rank of each TP degree. `weight_bytes`: of the whole model."""
    shards = [weight_bytes / tp_degree for tp_degree in tp_degrees]
    of_processes = WORKING_BYTES + PARKED_BYTES * (len(tp_degrees) - 1)
    return Footprint(sum(shards) if resident else max(shards), kv_cache_bytes, of_processes)


def host_footprint(
    weight_bytes: float, tp_degrees: Sequence[int], kv_cache_bytes: float, num_processes: int
) -> Footprint:
    """Memory of a CPU host that runs `num_processes` processes in each layout."""
    copies = sum(num_processes // tp_degree for tp_degree in tp_degrees)
    in_all = num_processes * len(tp_degrees)
    return Footprint(weight_bytes * copies, kv_cache_bytes * in_all, CPU_PROCESS_BYTES * in_all)


def start_share(
    weight_bytes: float, tp_degree: int, kv_cache_bytes: float, total_bytes: float
) -> float:
    """Share of a GPU that must be free for an engine that starts on it while those of other layouts
    wait there: vLLM's `gpu_memory_utilization`. `total_bytes`: of the whole GPU."""
    return min(1.0, (weight_bytes / tp_degree + kv_cache_bytes + WORKING_BYTES) / total_bytes)


def plan_parked_weights(
    parked_weights: ParkedWeights,
    weight_bytes: float,
    tp_degrees: Sequence[int],
    kv_cache_bytes: float,
    gpu_bytes: float,
) -> Literal["resident", "reloaded"]:
    """Whether engines keep their weights while they wait: where there is room, if it is left open.

    `tp_degrees`: of all layouts. `gpu_bytes`: of one GPU.
    """
    usable = gpu_bytes * USABLE_SHARE
    choices = ("resident", "reloaded") if parked_weights == "auto" else (parked_weights,)
    for choice in choices:
        needed = gpu_footprint(
            weight_bytes, tp_degrees, kv_cache_bytes, resident=choice == "resident"
        )
        if needed.bytes <= usable:
            return choice
    further = ", pat.parked_weights=reloaded" if choices == ("resident",) else ""
    raise ValueError(
        f"pat.tp_degrees: engines of TP degree {_listed(tp_degrees)} on the same GPUs need "
        f"{_gb(needed.bytes)} of the {_gb(usable)} that can be used of each ({needed}): take fewer "
        f"pat.tp_degrees, a smaller rollout.kv_cache_bytes{further} or a higher rollout.tp_degree"
    )


def require_host_memory(
    weight_bytes: float,
    tp_degrees: Sequence[int],
    kv_cache_bytes: float,
    num_processes: int,
    host_bytes: float,
) -> None:
    """Refuse layouts that a CPU host has no memory for."""
    needed = host_footprint(weight_bytes, tp_degrees, kv_cache_bytes, num_processes)
    usable = host_bytes * USABLE_SHARE
    if needed.bytes > usable:
        raise ValueError(
            f"pat.tp_degrees: engines of TP degree {_listed(tp_degrees)} on a CPU need "
            f"{_gb(needed.bytes)} of the {_gb(usable)} that can be used ({needed}): take fewer "
            "pat.tp_degrees, a smaller rollout.kv_cache_bytes or fewer rollout.num_engines"
        )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _listed(tp_degrees: Sequence[int]) -> str:
    return ", ".join(map(str, tp_degrees))
