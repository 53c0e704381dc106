"""Reserves GPUs that several processes share in turn: engines of a pool, or engine and trainer.

Ray gives a GPU to one actor. So one idle actor reserves them all on one node. The processes that
share them run on that node without GPUs of their own. They get the numbers of the GPUs to use.
"""

from dataclasses import dataclass

import ray

from refrain.engines.actors import NoAnswer, RemoteActor
from refrain.engines.gpus.cleanup import given_gpus, memory_of


@dataclass(frozen=True)
class ReservedGpus:
    """Reserved GPUs of one node."""

    node_id: str
    gpu_ids: tuple[int, ...]
    """GPUs as CUDA numbers them on that node."""
    memory_bytes: int
    """Free bytes of the fullest GPU."""
    total_bytes: int
    """Size of the smallest GPU in bytes."""
    holder: RemoteActor
    """Actor that holds them. They are free again once it is gone."""


class _Holder:
    def where(self) -> tuple[str, tuple[int, ...], int, int]:
        gpu_ids = given_gpus()
        # Do not ask torch: its CUDA context would take half a gigabyte of each GPU.
        sizes = memory_of(gpu_ids)
        free = min((free for free, _ in sizes), default=0)
        total = min((total for _, total in sizes), default=0)
        return ray.get_runtime_context().get_node_id(), gpu_ids, free, total


async def reserve_gpus(num_gpus: int, near: str | None, timeout_s: float) -> ReservedGpus:
    """Reserve GPUs of one node, preferably of node `near`. Raise RuntimeError if no node has enough
    free GPUs within `timeout_s`."""
    holder = RemoteActor("holder of GPUs", _Holder, node_id=near, soft=True, num_gpus=num_gpus)
    try:
        node_id, gpu_ids, free, total = await holder.call("where", timeout_s=timeout_s)
    except NoAnswer as error:
        raise RuntimeError(
            f"no node had {num_gpus} free GPUs, which several processes share in turn, within "
            f"{timeout_s:.0f} s"
        ) from error
    return ReservedGpus(node_id, gpu_ids, free, total, holder)
