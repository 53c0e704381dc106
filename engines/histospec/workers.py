"""History workers: Ray CPU actors, one a node, that keep the index files of a run.

    wanted {prompt: step} ─► missing? ─► rows of the store ─► build ─► files ◄─ mapped by engines

There is one call, `ensure`, for everything: rollouts that were just scored, prompts that return
after an eviction, files that were damaged or deleted, a restart. Files are shared by all nodes;
each worker looks after the prompts whose key falls to it. Histories are optional: a worker that
dies is restarted by Ray and finds its files again, and what fails is reported and costs speed only.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from engines.actors import ActorError, ActorGone, RemoteActor
from engines.histospec.library import IndexLibrary, PromptHistory
from schemas.counts import LibraryCounts
from schemas.drafting import DraftingConfig

CALL_TIMEOUT_S = 300.0
"""Longest time for one call to a worker."""
RESTART_S = 30.0
"""Longest time in which Ray restarts a worker that has died."""
_RETRY_S = 0.5
BUILD_PROMPTS = 64
"""Prompts whose rollouts are read from the store and indexed at a time."""
_NICENESS = 10
"""Niceness of a worker: building gives way to whatever else the node does."""

ReadRows = Callable[[Mapping[str, int]], Awaitable[Any]]
"""{prompt key: step} -> a table `engines.store.tables.INDEXED` of these rollouts, by prompt, or a
Ray object reference to it."""


class HistoryWorker(IndexLibrary):
    """A library in a process of its own; one thread, at low priority."""

    def __init__(
        self, directory: Path, config: DraftingConfig, share: int, num_shares: int
    ) -> None:
        os.nice(_NICENESS)
        own_bytes = {"max_index_bytes": config.max_index_bytes // num_shares}
        super().__init__(
            directory,
            config.model_copy(update=own_bytes),
            lambda key: share_of(key, num_shares) == share,
        )

    def add_rows(self, rows: pa.Table) -> None:
        self.add(histories(rows))


class HistoryWorkers:
    """History workers as the driver holds them. Needs Ray."""

    def __init__(
        self,
        directory: Path,
        config: DraftingConfig,
        on_trouble: Callable[[str], None],
        name: str | None = None,
    ) -> None:
        """`name`: what other processes find the actors by; their numbers are added to it."""
        self._directory, self._config, self._on_trouble = directory, config, on_trouble
        self._name = name
        self._actors: list[RemoteActor] = []
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task] = set()

    def start(self) -> None:
        import ray

        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        self._actors = [
            RemoteActor(
                f"history worker {share}",
                HistoryWorker,
                self._directory,
                self._config,
                share,
                len(nodes),
                node_id=node,
                soft=True,
                found_by=self._name and f"{self._name}-{share}",
                max_restarts=-1,
                max_task_retries=0,
                runtime_env={"env_vars": {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}},
            )
            for share, node in enumerate(nodes)
        ]

    def adopt(self, actors: Sequence[Any]) -> None:
        """Take the workers that another process has started."""
        self._actors = [
            RemoteActor.of(f"history worker {share}", actor) for share, actor in enumerate(actors)
        ]

    def prepare(self, wanted: Mapping[str, int], read_rows: ReadRows) -> None:
        """Start `ensure` in the background."""
        task = asyncio.create_task(self.ensure(wanted, read_rows))
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._on_trouble(f"histories were not indexed: {error!r}")

    async def ensure(self, wanted: Mapping[str, int], read_rows: ReadRows) -> int:
        """Have an index of each prompt, from the step given for it; returns how many there are.

        Not more than one at a time: what two calls want is built once.
        """
        async with self._lock:
            num_there = 0
            for share in range(len(self._actors)):
                own = {k: s for k, s in wanted.items() if share_of(k, len(self._actors)) == share}
                num_there += await self._ensure_share(share, own, read_rows)
            return num_there

    async def counts(self) -> LibraryCounts:
        """Counts of all workers together; one that does not answer counts nothing."""
        async with self._lock:
            answers = [await self._call(actor, "counts") for actor in self._actors]
        return reduce(add, (answer for answer in answers if answer), LibraryCounts())

    async def shutdown(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for actor in self._actors:
            actor.kill()
        self._actors = []

    async def _ensure_share(
        self, share: int, wanted: Mapping[str, int], read_rows: ReadRows
    ) -> int:
        actor = self._actors[share]
        missing: list[str] | None = await self._call(actor, "missing", dict(wanted))
        if missing is None:
            return 0
        num_there = len(wanted) - len(missing)
        for first in range(0, len(missing), BUILD_PROMPTS):
            keys = missing[first : first + BUILD_PROMPTS]
            rows = await read_rows({key: wanted[key] for key in keys})
            if await self._call(actor, "add_rows", rows) is None:
                return num_there
            num_there += len(keys)
        return num_there

    async def _call(self, actor: RemoteActor, method: str, *args: Any) -> Any:
        """The answer, True in place of none; None when there was trouble. A worker that has died is
        asked again until Ray has restarted it."""
        deadline_s = time.monotonic() + RESTART_S
        while True:
            try:
                answer = await actor.call(method, *args, timeout_s=CALL_TIMEOUT_S)
                return True if answer is None else answer
            except ActorError as error:
                if isinstance(error, ActorGone) and time.monotonic() < deadline_s:
                    await asyncio.sleep(_RETRY_S)
                    continue
                if error.cause and not isinstance(error.cause, OSError):
                    raise
                self._on_trouble(f"no histories: {error}")
                return None


def share_of(prompt_key: str, num_shares: int) -> int:
    return int(prompt_key[:8], 16) % num_shares


def histories(rows: pa.Table) -> list[PromptHistory]:
    """One for each prompt; its rows are next to each other."""
    keys = rows["prompt_key"].to_pylist()
    starts = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
    responses = _lists(rows["response_token_ids"])
    rewards = rows["reward"].to_numpy()
    steps = rows["step"].to_numpy()
    return [
        PromptHistory(
            prompt_key=keys[start],
            step=int(steps[start]),
            prompt_token_ids=rows["prompt_token_ids"][start].values.to_numpy(),
            responses=responses[start:end],
            rewards=rewards[start:end].tolist(),
        )
        for start, end in pairwise([*starts, len(keys)])
    ]


def _lists(column: pa.ChunkedArray) -> list[np.ndarray]:
    array = column.combine_chunks()
    offsets = array.offsets.to_numpy()
    return np.split(array.flatten().to_numpy(), offsets[1:-1] - offsets[0])
