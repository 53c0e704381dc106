"""Nodes in one process, to count the weights that they send to each other, without Ray."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from ray.exceptions import ActorDiedError, RayTaskError

from refrain.engines import couriers
from refrain.engines.couriers import Courier
from refrain.engines.weights_file import VersionFiles
from refrain.schemas.weights import WeightsFile

ORIGIN = "node 0"
PART_BYTES = 4096
_NUM_PARTS = 8


class LocalNodes:
    """Couriers of several nodes. `ORIGIN` has the trainer."""

    def __init__(self, num_nodes: int) -> None:
        self.couriers = {f"node {i}": Courier(f"node {i}") for i in range(num_nodes)}
        self.levels: dict[str, int] = {}
        """Level of each node in the tree that it joined last."""
        self.delays_s: dict[str, float] = {}
        """Seconds that a node takes to answer, if not 0."""
        self._dead: set[str] = set()
        self._answers: dict[str, set[asyncio.Task]] = {node: set() for node in self.couriers}

    @property
    def num_bytes_sent(self) -> dict[str, int]:
        """Bytes of weights that other nodes have read from each node."""
        return {node: courier._num_sent for node, courier in self.couriers.items()}

    @property
    def others(self) -> list[str]:
        return [node for node in self.couriers if node != ORIGIN and node not in self._dead]

    def kill(self, node: str) -> None:
        self._dead.add(node)
        self.couriers[node]._forget()
        for answer in self._answers[node]:
            answer.cancel()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let couriers find each other here instead of in Ray, and send small parts."""
        with ExitStack() as stack:
            for name, value in {
                "courier_of": self._actor,
                "existing_courier": self._existing,
                "PART_BYTES": PART_BYTES,
            }.items():
                stack.enter_context(patch.object(couriers, name, value))
            try:
                yield
            finally:
                for courier in self.couriers.values():
                    courier._forget()

    async def send(self, policy_version: int, file: WeightsFile) -> list[Any]:
        """Copy a version to all other nodes. Return the path of each file, or the error."""
        fetches = (self.couriers[node].fetch(policy_version, file) for node in self.others)
        return await asyncio.gather(*fetches, return_exceptions=True)

    def _actor(self, node: str) -> Any:
        return SimpleNamespace(handle=_Handle(self, node))

    def _existing(self, node: str) -> Any:
        if node in self._dead:
            raise ValueError(f"there is no courier of {node}")
        return _Handle(self, node)

    async def answer(self, node: str, method: str, *args: Any) -> Any:
        if node in self._dead:
            raise ActorDiedError
        answer = asyncio.create_task(getattr(self.couriers[node], method)(*args))
        self._answers[node].add(answer)
        try:
            if node in self.delays_s:
                await asyncio.sleep(self.delays_s[node])
            value = await answer
        except asyncio.CancelledError:
            if node in self._dead:
                raise ActorDiedError from None
            raise
        except Exception as error:
            raise RayTaskError(method, "", error).as_instanceof_cause() from error
        finally:
            self._answers[node].discard(answer)
        if isinstance(value, np.ndarray):
            value = value.copy()
        if method == "join":
            self.levels[args[1]] = value[1]
        return value


class _Handle:
    """Handle of a courier. Its calls begin at once, as Ray's do."""

    def __init__(self, nodes: LocalNodes, node: str) -> None:
        self._nodes, self._node = nodes, node

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, method))

    def _call(self, method: str, *args: Any) -> asyncio.Future:
        call = asyncio.ensure_future(self._nodes.answer(self._node, method, *args))
        # A courier that turns to another parent leaves calls behind. Their errors do not matter.
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return call


def random_version(files: VersionFiles, policy_version: int) -> WeightsFile:
    """Write random bytes as a version on `ORIGIN`. The last part is shorter than the others."""
    num_bytes = _NUM_PARTS * PART_BYTES - 100
    with files.writing(policy_version, num_bytes) as memory:
        memory[:] = np.random.default_rng(policy_version).bytes(num_bytes)
    return WeightsFile(files.path(policy_version), num_bytes, files.num_kept, ORIGIN)


async def count_copies(num_nodes: int) -> dict[str, float]:
    """Return how often the trainer's node sends a version, and the hops of a part."""
    nodes, files = LocalNodes(num_nodes), VersionFiles(2)
    with nodes.in_place():
        file = random_version(files, 0)
        content = file.path.read_bytes()
        paths = await nodes.send(0, file)
        assert all(path.read_bytes() == content for path in paths)
    files.delete()
    return {
        f"origin_copies_{num_nodes}_nodes": nodes.num_bytes_sent[ORIGIN] / file.num_bytes,
        f"hops_{num_nodes}_nodes": max(nodes.levels.values()),
    }
