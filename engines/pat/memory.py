"""Checks whether GPUs have room for the parked engines of other layouts. Pure.

A GPU has one process per layout, and one of them works (T: its TP degree, W: bytes of all weights):

    resident   sum over layouts of W / T  + KV cache of one + overhead of each process
    reloaded   largest W / T              + KV cache of one + overhead of each process

On a CPU, parking frees nothing: every process keeps its weights and KV cache, and all share the
host's memory.

Deviation: PAT has one engine and reshards its weights in place (4.3). This needs no room for other
layouts but 2.5 GB during a switch (5.4), and about a second per switch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CONTEXT_BYTES = 0.5e9
"""Assumed size of a process's CUDA context and loaded code."""
NCCL_BYTES = 0.3e9
"""Assumed size of the buffers of its communication groups."""
GRAPH_BYTES = 0.4e9
"""Assumed size of its captured graphs, which vLLM keeps while it sleeps."""
ACTIVATION_BYTES = 2.8e9
"""Assumed size of activations and logits of a step of 8,192 tokens, with torch's cached memory."""
PARKED_BYTES = CONTEXT_BYTES + NCCL_BYTES + GRAPH_BYTES
"""Bytes of a parked process, beside weights."""
WORKING_BYTES = PARKED_BYTES + ACTIVATION_BYTES
"""Bytes of a working process, beside weights and KV cache."""
CPU_PROCESS_BYTES = 0.6e9
"""Memory of an engine's process on a CPU, beside weights and KV cache, as small engines need it."""
USABLE_SHARE = 0.95
"""Share of a GPU's or host's memory that plans may use."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that one GPU or CPU host needs."""

    weights_bytes: float
    kv_cache_bytes: float
    process_bytes: float
    index_bytes: float = 0.0
    """History indexes on the GPU."""

    @property
    def bytes(self) -> float:
        return self.weights_bytes + self.kv_cache_bytes + self.process_bytes + self.index_bytes

    def __str__(self) -> str:
        index = f", {_gb(self.index_bytes)} of history indexes" if self.index_bytes else ""
        return (
            f"{_gb(self.weights_bytes)} of weights, {_gb(self.kv_cache_bytes)} of KV cache{index} "
            f"and {_gb(self.process_bytes)} of processes"
        )


def gpu_footprint(
    weight_bytes: float, tp_degrees: Sequence[int], kv_cache_bytes: float, *, resident: bool
) -> Footprint:
    """Return the memory of a GPU with a rank of each TP degree. `weight_bytes`: whole model."""
    shards = [weight_bytes / tp_degree for tp_degree in tp_degrees]
    of_processes = WORKING_BYTES + PARKED_BYTES * (len(tp_degrees) - 1)
    return Footprint(sum(shards) if resident else max(shards), kv_cache_bytes, of_processes)


def host_footprint(
    weight_bytes: float, tp_degrees: Sequence[int], kv_cache_bytes: float, num_processes: int
) -> Footprint:
    """Return the memory of a CPU host with `num_processes` processes in each layout."""
    copies = sum(num_processes // tp_degree for tp_degree in tp_degrees)
    in_all = num_processes * len(tp_degrees)
    return Footprint(weight_bytes * copies, kv_cache_bytes * in_all, CPU_PROCESS_BYTES * in_all)


def start_share(
    weight_bytes: float, tp_degree: int, kv_cache_bytes: float, total_bytes: float
) -> float:
    """Return the share of a GPU that must be free when an engine starts beside parked engines.

    This is vLLM's `gpu_memory_utilization`. `total_bytes`: memory of the whole GPU.
    """
    return min(1.0, (weight_bytes / tp_degree + kv_cache_bytes + WORKING_BYTES) / total_bytes)


def plan_parked_weights(
    weight_bytes: float,
    tp_degrees: Sequence[int],
    kv_cache_bytes: float,
    gpu_bytes: float,
) -> Literal["resident", "reloaded"]:
    """Choose whether parked engines keep their weights: they do if there is room.

    `tp_degrees`: of all layouts. `gpu_bytes`: memory of one GPU. Raise ValueError if nothing fits.
    """
    usable = gpu_bytes * USABLE_SHARE
    for choice in ("resident", "reloaded"):
        needed = gpu_footprint(
            weight_bytes, tp_degrees, kv_cache_bytes, resident=choice == "resident"
        )
        if needed.bytes <= usable:
            return choice
    raise ValueError(
        f"pat.tp_degrees: engines of TP degree {_listed(tp_degrees)} on the same GPUs need "
        f"{_gb(needed.bytes)} of each GPU ({needed}), but only {_gb(usable)} can be used. Take "
        "fewer pat.tp_degrees, a smaller rollout.kv_cache_bytes or a higher rollout.tp_degree"
    )


def require_host_memory(
    weight_bytes: float,
    tp_degrees: Sequence[int],
    kv_cache_bytes: float,
    num_processes: int,
    host_bytes: float,
) -> None:
    """Raise ValueError if the layouts do not fit into a CPU host's memory."""
    needed = host_footprint(weight_bytes, tp_degrees, kv_cache_bytes, num_processes)
    usable = host_bytes * USABLE_SHARE
    if needed.bytes > usable:
        raise ValueError(
            f"pat.tp_degrees: engines of TP degree {_listed(tp_degrees)} on a CPU need "
            f"{_gb(needed.bytes)} ({needed}), but only {_gb(usable)} can be used. Take fewer "
            "pat.tp_degrees, a smaller rollout.kv_cache_bytes or fewer rollout.num_engines"
        )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _listed(tp_degrees: Sequence[int]) -> str:
    return ", ".join(map(str, tp_degrees))
