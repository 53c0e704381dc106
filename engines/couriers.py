"""Copy policy versions from the trainer's node to each other node, once per node.

```
trainer, rank 0 ── prefetches ─► courier of each node whose engines have asked before
engine ──────────── asks ──────► courier of its node ── reads in parts ──► courier of the
                                 (one file that all                        trainer's node
                                 engines there map)
```

So the copy starts as soon as the trainer has a new version, while engines still generate with the
previous one. Engines on the trainer's own node map the trainer's file.
"""

import asyncio
import logging
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.actors import RemoteActor
from engines.bounded import wait_for
from engines.weights_file import VersionFiles
from schemas.weights import WeightsFile

logger = logging.getLogger(__name__)

PART_BYTES = 64 * 2**20
"""Bytes of one part, which is one object in Ray's store."""
PARTS_ON_THE_WAY = 3
"""Parts to request at the same time."""
PART_S = 120.0
"""Longest wait for a part."""


class Courier:
    """Actor of a node. Its files go away when its process ends (`PrivateDir`)."""

    def __init__(self) -> None:
        self._files: VersionFiles | None = None
        self._origin: Path | None = None
        """Directory of the trainer that the copied versions come from."""
        self._fetching: dict[int, asyncio.Task[Path]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._was_asked = False
        self._num_bytes = 0
        self._sender: RemoteActor | None = None

    async def fetch(self, policy_version: int, file: WeightsFile) -> Path:
        """Copy a version to this node, unless it is there. Return the path of its file."""
        self._was_asked = True
        # If an engine stops waiting, the copy must go on for the others.
        return await asyncio.shield(self._fetched(policy_version, file))

    async def expect(self, policy_version: int, file: WeightsFile) -> None:
        """Copy a version in advance, if engines of this node have asked for versions before."""
        if not self._was_asked:
            return
        try:
            await asyncio.shield(self._fetched(policy_version, file))
        except Exception as error:
            # The first engine that asks makes the courier try again, and gets the error then.
            logger.warning("could not copy policy version %d here: %s", policy_version, error)

    async def read(self, path: Path, first: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return a part of a file on this node."""
        # `asarray` drops the memmap class: Ray copies a plain array once, straight into its store.
        return np.asarray(np.memmap(path, np.uint8, "r", first, (num_bytes,)))

    async def num_bytes_fetched(self) -> int:
        """Return the bytes that were copied to this node."""
        return self._num_bytes

    async def delete(self) -> None:
        """Delete all versions on this node."""
        self._forget()

    def _fetched(self, policy_version: int, file: WeightsFile) -> asyncio.Task[Path]:
        if self._origin != file.path.parent:
            self._forget()
            self._files, self._origin = VersionFiles(file.num_kept), file.path.parent
        task = self._fetching.get(policy_version)
        failed = task is not None and task.done() and (task.cancelled() or task.exception())
        if task is None or failed:
            assert self._files is not None
            task = asyncio.create_task(self._fetch(policy_version, file, self._files))
            self._fetching[policy_version] = task
        return task

    async def _fetch(self, policy_version: int, file: WeightsFile, files: VersionFiles) -> Path:
        assert file.node_id is not None
        async with self._one_at_a_time:
            sender = self._sender = courier_of(file.node_id)
            firsts = deque(range(0, file.num_bytes, PART_BYTES))
            coming: deque[tuple[int, Any]] = deque()
            with files.writing(policy_version, file.num_bytes) as memory:
                while firsts or coming:
                    while firsts and len(coming) < PARTS_ON_THE_WAY:
                        first = firsts.popleft()
                        size = min(PART_BYTES, file.num_bytes - first)
                        coming.append((first, sender.handle.read.remote(file.path, first, size)))
                    first, reply = coming.popleft()
                    part = await wait_for(reply, PART_S)
                    memory[first : first + len(part)] = part.data
                    self._num_bytes += len(part)
            for old in [v for v in self._fetching if v != policy_version and not files.has(v)]:
                if self._fetching[old].done():
                    del self._fetching[old]
            return files.path(policy_version)

    def _forget(self) -> None:
        for task in self._fetching.values():
            task.cancel()
        self._fetching.clear()
        if self._files:
            self._files.delete()
        self._files = self._origin = None


def courier_of(node_id: str) -> RemoteActor:
    """Return a node's courier, and start it if needed. It ends with the process that started it."""
    return RemoteActor(
        f"courier of node {node_id}",
        Courier,
        node_id=node_id,
        found_by=f"courier-{node_id}",
        get_if_exists=True,
    )


class Couriers:
    """The couriers of all nodes. The trainer holds them, because it outlives every engine."""

    def __init__(self, node_id: str) -> None:
        """`node_id`: the trainer's node."""
        self._node_id = node_id
        self._couriers: dict[str, RemoteActor] = {}

    def prefetch(self, policy_version: int, file: WeightsFile) -> None:
        """Tell all other nodes to copy a version in advance. Do not wait.

        If a copy fails, the engine that asks for the version gets the error.
        """
        import ray

        nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        others = nodes - {self._node_id}
        if not others:
            return
        # This includes the courier of the trainer's node, which sends the files.
        self._couriers = {node: self._couriers.get(node) or courier_of(node) for node in nodes}
        for node in others:
            self._couriers[node].handle.expect.remote(policy_version, file)

    def end(self) -> None:
        """Release all couriers and delete their files."""
        for courier in self._couriers.values():
            courier.handle.delete.remote()
        self._couriers.clear()
