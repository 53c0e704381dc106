"""Keeps an engine's place in a cluster over its restarts, and notices soon when it has none.

engine with       has a place        may get one          has none
GPUs of its own   Ray keeps GPUs     no node is dead:     a node is dead, and for `PLACE_S` Ray has
                  for it             Ray waits for some   found no GPUs for it elsewhere
GPUs of a pool    their node lives                        their node is dead
no GPUs           on any node
"""

import asyncio
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from refrain.engines.bounded import call_in_thread

LOOK_S = 2.0
"""Seconds between two checks of the cluster."""
PLACE_S = 20.0
"""Longest time for Ray to find free GPUs after it knows of a dead node. The GPUs of a killed engine
become free some seconds later."""
ANSWER_S = 10.0
"""Longest time until Ray answers."""


class NoPlace(RuntimeError):
    """An engine has lost its place in the cluster."""


def why_unplaced(
    num_gpus: int, node_id: str | None, lost: Collection[str], unplaced_s: float
) -> str:
    """Return why an engine has no place, or "" if it has one or may get one.

    Args:
        num_gpus: GPUs of its own.
        node_id: Node that it must be on.
        lost: Dead nodes that were alive when the place was requested.
        unplaced_s: Seconds since Ray knew of dead nodes and had no GPUs for the engine.
    """
    if node_id:
        return "the node of its GPUs is dead" if node_id in lost else ""
    if not (num_gpus and lost) or unplaced_s < PLACE_S:
        return ""
    return f"a node of the cluster is dead, and no other has {num_gpus} free GPUs for it"


class Place:
    """An engine's place. Creating it asks Ray for the GPUs."""

    def __init__(self, num_gpus: int, node_id: str | None = None, near: str | None = None) -> None:
        """`num_gpus`: GPUs of its own on one node, on `near` if that node has them. `node_id`: node
        that it must be on instead."""
        import ray
        from ray.util.placement_group import placement_group

        assert not (num_gpus and node_id)
        self._num_gpus, self._node_id = num_gpus, node_id
        bundles = [{"GPU": float(num_gpus)}]
        self._group = (
            placement_group(bundles, strategy="STRICT_PACK", _soft_target_node_id=near)
            if num_gpus
            else None
        )
        self._known = frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])
        self._at_rest_s = time.monotonic()
        """Last time at which the engine had its GPUs or no node was dead."""

    @property
    def options(self) -> dict[str, Any]:
        """Ray options of the actor that takes this place."""
        if self._group is None:
            return {"num_gpus": 0, "node_id": self._node_id}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        return {"num_gpus": self._num_gpus, "scheduling_strategy": strategy}

    async def watch(self) -> None:
        """Wait until the place is lost, and raise `NoPlace`."""
        self._at_rest_s = time.monotonic()
        while not (why := await self.look()):
            await asyncio.sleep(LOOK_S)
        raise NoPlace(why)

    async def look(self) -> str:
        """Return why it has no place, as `why_unplaced`. Also "" while Ray does not answer."""
        with suppress(TimeoutError):
            return await call_in_thread(self._look, ANSWER_S)
        return ""

    def _look(self) -> str:
        import ray
        from ray.util.placement_group import placement_group_table

        now_s = time.monotonic()
        lost = self._known - {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        placed = self._group is None or placement_group_table(self._group)["state"] == "CREATED"
        if placed or not lost:
            self._at_rest_s = now_s
        return why_unplaced(self._num_gpus, self._node_id, lost, now_s - self._at_rest_s)

    async def give_back(self) -> None:
        """Return the GPUs to Ray. An actor on them ends."""
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            with suppress(TimeoutError):
                await call_in_thread(lambda: remove_placement_group(self._group), ANSWER_S)
