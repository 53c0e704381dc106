"""GPUs that several share in turn, engines of a pool or an engine and the trainer, kept from
everybody else.

Ray gives a GPU to one actor. So an actor that does nothing holds them, all on one node, and those
who share them run on that node without GPUs of their own, told which ones to use.
"""

from dataclasses import dataclass

import ray

from engines.actors import NoAnswer, RemoteActor
from engines.gpus.leftovers import given_gpus, memory_of


@dataclass(frozen=True)
class HeldGpus:
    """GPUs of one node."""

    node_id: str
    gpu_ids: tuple[int, ...]
    """GPUs as CUDA numbers them on that node."""
    memory_bytes: int
    """Bytes that are free on the fullest of them."""
    total_bytes: int
    """Bytes that the smallest of them has."""
    holder: RemoteActor
    """Actor that holds them: they are free again when it is gone."""


class _Holder:
    def where(self) -> tuple[str, tuple[int, ...], int, int]:
        gpu_ids = given_gpus()
        # Not by torch: a CUDA context of its own would take half a gigabyte of each.
        sizes = memory_of(gpu_ids)
        free = min((free for free, _ in sizes), default=0)
        total = min((total for _, total in sizes), default=0)
        return ray.get_runtime_context().get_node_id(), gpu_ids, free, total


async def hold_gpus(num_gpus: int, near: str | None, timeout_s: float) -> HeldGpus:
    """`near`: node that they are of, if it has them. Raises RuntimeError when no node has so many
    GPUs left."""
    holder = RemoteActor("holder of GPUs", _Holder, node_id=near, soft=True, num_gpus=num_gpus)
    try:
        node_id, gpu_ids, free, total = await holder.call("where", timeout_s=timeout_s)
    except NoAnswer as error:
        raise RuntimeError(
            f"{num_gpus} GPUs of one node, which several processes share in turn: none free in "
            f"{timeout_s:.0f} s"
        ) from error
    return HeldGpus(node_id, gpu_ids, free, total, holder)
