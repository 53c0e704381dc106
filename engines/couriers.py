"""Copy policy versions from the trainer's node to each other node, once per node, along a tree.

```
trainer, rank 0 ── prefetches ─► courier of each node whose engines have asked before
engine ──────────── asks ──────► courier of its node ── joins the tree ─► courier of the
                                 (one file that all                       trainer's node (origin)
                                 engines there map)   ── reads in parts ─► parent: the origin
                                                                          or an earlier reader
```

The copy starts as soon as the trainer has a new version, while engines still generate with the
previous one. Engines on the trainer's own node map the trainer's file.

The origin gives each reader a parent, so it sends a version `FAN_OUT` times, for any number of
nodes. A courier passes on a part as soon as the part is there. If a parent dies or hangs, its
readers read the rest from the origin.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refrain.engines.actors import RemoteActor
from refrain.engines.bounded import wait_for
from refrain.engines.weights_file import LostFile, VersionFiles
from refrain.schemas.weights import WeightsFile

logger = logging.getLogger(__name__)

FAN_OUT = 2
"""Readers of a node. More of them would share its network."""
PART_BYTES = 64 * 2**20
"""Bytes of one part, which is one object in Ray's store."""
PARTS_ON_THE_WAY = 3
"""Parts to request at the same time."""
PART_S = 120.0
"""Longest wait for a part."""
LEVEL_S = 10.0
"""Further wait for a part, for each level below the origin. If a node hangs, its own readers give
up first, and can then send to those below them."""

Read = Callable[[int, int], Awaitable[NDArray[np.uint8]]]
"""Requests a part, given its first byte and its bytes."""


class _Copy:
    """A version that arrives at this node, from its first byte to its last."""

    task: asyncio.Task[Path]

    def __init__(self) -> None:
        self.memory: mmap | None = None
        self.num_bytes = 0
        """Bytes that have arrived."""
        self._ended = False
        self._changed = asyncio.Event()

    def add(self, part: NDArray[np.uint8]) -> None:
        assert self.memory is not None
        self.memory[self.num_bytes : self.num_bytes + len(part)] = part.data
        self.num_bytes += len(part)
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self, _: asyncio.Task[Path]) -> None:
        self._ended = True
        self._changed.set()

    async def until(self, num_bytes: int) -> None:
        """Wait until so many bytes have arrived, or until no more will."""
        while self.num_bytes < num_bytes and not self._ended:
            await self._changed.wait()


class Courier:
    """Actor of a node. Its files go away when its process ends (`PrivateDir`)."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._files: VersionFiles | None = None
        self._origin: Path | None = None
        """Directory of the trainer that the copied versions come from."""
        self._copies: dict[int, _Copy] = {}
        self._one_at_a_time = asyncio.Lock()
        self._was_asked = False
        self._num_fetched = self._num_sent = 0
        """Bytes."""
        self._sender: RemoteActor | None = None
        """Courier of the trainer's node. It lives as long as its handles."""
        self._readers: dict[Path, list[str]] = {}
        """Nodes that read a file of this node, in the order of the tree."""

    async def fetch(self, policy_version: int, file: WeightsFile) -> Path:
        """Copy a version to this node, unless it is there. Return the path of its file."""
        self._was_asked = True
        # If an engine stops waiting, the copy must go on for the others.
        return await asyncio.shield(self._copied(policy_version, file))

    async def expect(self, policy_version: int, file: WeightsFile) -> None:
        """Copy a version in advance, if engines of this node have asked for versions before."""
        if not self._was_asked:
            return
        try:
            await asyncio.shield(self._copied(policy_version, file))
        except Exception as error:
            # The first engine that asks makes the courier try again, and gets the error then.
            logger.warning("could not copy policy version %d here: %s", policy_version, error)

    async def join(self, file: WeightsFile, node_id: str) -> tuple[str | None, int]:
        """Add a reader of a file on this node to its tree.

        Return the node to read from, None for this one, and the reader's level: 1 is below this.
        A reader that comes again gets the same parent, so no two nodes wait for each other.
        """
        nodes = self._readers.setdefault(file.path, [])
        if len(self._readers) > file.num_kept:
            del self._readers[next(iter(self._readers))]
        if node_id not in nodes:
            nodes.append(node_id)
        # Node `i` has the children `FAN_OUT * i + 1` and so on. Node 0 is the origin.
        place = nodes.index(node_id) + 1
        parent, level = (place - 1) // FAN_OUT, 0
        while place:
            place, level = (place - 1) // FAN_OUT, level + 1
        return (nodes[parent - 1] if parent else None), level

    async def read(self, path: Path, first: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return a part of a file on this node."""
        mapped = np.memmap(path, np.uint8, "r", first, (num_bytes,))
        self._num_sent += num_bytes
        # `asarray` drops the memmap class: Ray copies a plain array once, straight into its store.
        return np.asarray(mapped)

    async def pass_on(
        self, policy_version: int, file: WeightsFile, first: int, num_bytes: int
    ) -> NDArray[np.uint8]:
        """Return a part of a version that this node copies too. Wait until the part is here.

        Raise `LostFile` if the part does not arrive, or the version is no longer kept.
        """
        copy = self._copies.get(policy_version) if self._origin == file.path.parent else None
        if copy:
            await copy.until(first + num_bytes)
            kept = not copy.task.done() or (self._files and self._files.has(policy_version))
            if kept and copy.memory and copy.num_bytes >= first + num_bytes:
                self._num_sent += num_bytes
                return np.frombuffer(copy.memory, np.uint8, num_bytes, first)
        raise LostFile(f"node {self._node_id} has no policy version {policy_version}")

    async def num_bytes_fetched(self) -> int:
        """Return the bytes that were copied to this node."""
        return self._num_fetched

    async def num_bytes_sent(self) -> int:
        """Return the bytes that other nodes have read here."""
        return self._num_sent

    async def delete(self) -> None:
        """Delete all versions on this node."""
        self._forget()
        self._readers.clear()

    def _copied(self, policy_version: int, file: WeightsFile) -> asyncio.Task[Path]:
        if self._origin != file.path.parent:
            self._forget()
            self._files, self._origin = VersionFiles(file.num_kept), file.path.parent
        copy = self._copies.get(policy_version)
        failed = copy and copy.task.done() and (copy.task.cancelled() or copy.task.exception())
        if copy is None or failed:
            assert self._files is not None
            copy = self._copies[policy_version] = _Copy()
            copy.task = asyncio.create_task(self._copy(policy_version, file, self._files, copy))
            copy.task.add_done_callback(copy.end)
        return copy.task

    async def _copy(
        self, policy_version: int, file: WeightsFile, files: VersionFiles, copy: _Copy
    ) -> Path:
        async with self._one_at_a_time:
            with files.writing(policy_version, file.num_bytes) as copy.memory:
                await self._receive(policy_version, file, copy)
            for old in [v for v in self._copies if v != policy_version and not files.has(v)]:
                if self._copies[old].task.done():
                    del self._copies[old]
            return files.path(policy_version)

    async def _receive(self, policy_version: int, file: WeightsFile, copy: _Copy) -> None:
        from ray.exceptions import RayError

        assert file.node_id is not None
        self._sender = courier_of(file.node_id)
        origin = self._sender.handle
        parent, level = await wait_for(origin.join.remote(file, self._node_id), PART_S)
        if parent:
            try:
                passed_on = existing_courier(parent).pass_on
                read = partial(passed_on.remote, policy_version, file)
                await self._read_all(read, file.num_bytes, copy, PART_S + LEVEL_S * level)
            except (RayError, TimeoutError, ValueError) as error:
                logger.warning(
                    "node %s reads policy version %d from the trainer's node: node %s failed: %r",
                    *(self._node_id, policy_version, parent, error),
                )
        read = partial(origin.read.remote, file.path)
        await self._read_all(read, file.num_bytes, copy, PART_S)
        # The trainer deletes a version before any node does. So while its file is there, no part
        # was of a later version. If it is gone, this raises.
        await wait_for(read(0, 1), PART_S)

    async def _read_all(self, read: Read, num_bytes: int, copy: _Copy, wait_s: float) -> None:
        """Read the bytes that have not arrived yet."""
        firsts = deque(range(copy.num_bytes, num_bytes, PART_BYTES))
        coming: deque[Awaitable[NDArray[np.uint8]]] = deque()
        while firsts or coming:
            while firsts and len(coming) < PARTS_ON_THE_WAY:
                first = firsts.popleft()
                coming.append(read(first, min(PART_BYTES, num_bytes - first)))
            part = await wait_for(coming.popleft(), wait_s)
            copy.add(part)
            self._num_fetched += len(part)

    def _forget(self) -> None:
        for copy in self._copies.values():
            copy.task.cancel()
        self._copies.clear()
        if self._files:
            self._files.delete()
        self._files = self._origin = None


def courier_of(node_id: str) -> RemoteActor:
    """Return a node's courier, and start it if needed. It ends with the process that started it."""
    return RemoteActor(
        f"courier of node {node_id}",
        Courier,
        node_id,
        node_id=node_id,
        found_by=_ray_name(node_id),
        get_if_exists=True,
    )


def existing_courier(node_id: str) -> Any:
    """Return the handle of a node's courier. Raise ValueError if there is none."""
    import ray

    return ray.get_actor(_ray_name(node_id))


def _ray_name(node_id: str) -> str:
    return f"courier-{node_id}"


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
