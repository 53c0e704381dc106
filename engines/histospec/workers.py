"""History workers: Ray CPU actors, one a node, that keep the index files of a run.

    wanted {prompt: step} ─► missing? ─► rows of the store ─► build ─► files ◄─ mapped by engines

There is one call, `ensure`, for everything: rollouts that were just scored, prompts that return
after an eviction, files that were damaged or deleted, a restart. Files are shared by all nodes;
each worker looks after the prompts whose key falls to it. Histories are optional: a worker that
dies or hangs is started again and finds its files, one that does not come back is given up, and
what fails is reported and costs speed only.
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

from engines.actors import ActorError, ActorGone, NoAnswer, RemoteActor
from engines.bounded import all_of
from engines.histospec.library import IndexLibrary, PromptHistory
from engines.histospec.shared import SharedLibrary
from schemas.counts import LibraryCounts
from schemas.drafting import DraftingConfig

ANSWER_S = 120.0
"""Longest time for one call to a worker, its start included: one that takes longer hangs, and is
started again."""
RESTART_S = 30.0
"""Longest time in which Ray restarts a worker that has died."""
MAX_RESTARTS = 20
"""Times in a run that a worker is started again."""
_RETRY_S = 0.5
BUILD_PROMPTS = 32
"""Prompts whose rollouts are read from the store and indexed at a time."""
SHARING_WORKERS = 4
"""Workers that write shared indexes, at most: engines ask each of their files."""
_NICENESS = 10
"""Niceness of a worker: building gives way to whatever else the node does."""

ReadRows = Callable[[Mapping[str, int]], Awaitable[Any]]
"""{prompt key: step} -> a table `engines.store.tables.INDEXED` of these rollouts, by prompt, or a
Ray object reference to it."""


class HistoryWorker(IndexLibrary):
    """A library in a process of its own; one thread, at low priority."""

    def __init__(
        self,
        directory: Path,
        config: DraftingConfig,
        share: int,
        num_shares: int,
        epoch_steps: int = 0,
    ) -> None:
        """`epoch_steps`: see `SharedLibrary`."""
        os.nice(_NICENESS)
        num_sharing = min(num_shares, SHARING_WORKERS)
        own_bytes = {
            "max_index_bytes": config.max_index_bytes // num_shares,
            "shared_tokens": config.shared_tokens // num_sharing if share < num_sharing else 0,
        }
        own = config.model_copy(update=own_bytes)
        super().__init__(directory, own, lambda key: share_of(key, num_shares) == share)
        self._shared = SharedLibrary(directory, own, epoch_steps, share)

    def look_up(self, wanted: Mapping[str, int]) -> tuple[list[str], LibraryCounts]:
        return self.missing(wanted), self.counts()

    def add_rows(self, rows: pa.Table) -> LibraryCounts:
        found = histories(rows)
        self.add(found)
        self._shared.add(found)
        return self.counts()


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
        self._locks: list[asyncio.Lock] = []
        self._counts: dict[int, LibraryCounts] = {}
        self._given_up: set[int] = set()
        """Workers that did not come back."""
        self._tasks: set[asyncio.Task] = set()

    def start(self, epoch_steps: int = 0) -> None:
        """`epoch_steps`: steps of an epoch, where it is known."""
        import ray

        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        actors = [
            RemoteActor(
                f"history worker {share}",
                HistoryWorker,
                self._directory,
                self._config,
                share,
                len(nodes),
                epoch_steps,
                node_id=node,
                soft=True,
                found_by=self._name and f"{self._name}-{share}",
                max_restarts=MAX_RESTARTS,
                max_task_retries=0,
                runtime_env={"env_vars": {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}},
            )
            for share, node in enumerate(nodes)
        ]
        self._take(actors)

    def adopt(self, actors: Sequence[Any]) -> None:
        """Take the workers that another process has started."""
        self._take(
            [RemoteActor.of(f"history worker {share}", actor) for share, actor in enumerate(actors)]
        )

    def _take(self, actors: list[RemoteActor]) -> None:
        self._actors = actors
        self._locks = [asyncio.Lock() for _ in actors]

    def prepare(self, wanted: Mapping[str, int], read_rows: ReadRows) -> asyncio.Task[int]:
        """Start `ensure` in the background; it goes on for somebody who waits no longer."""
        task = asyncio.create_task(self.ensure(wanted, read_rows))
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._on_trouble(f"histories were not indexed: {error!r}")

    async def ensure(self, wanted: Mapping[str, int], read_rows: ReadRows) -> int:
        """Have an index of each prompt, from the step given for it; returns how many there are.

        A worker has not more than one call at a time: what two calls want is built once.
        """
        shares = range(len(self._actors))
        wanted_of = {
            share: {key: s for key, s in wanted.items() if share_of(key, len(shares)) == share}
            for share in shares
        }
        return sum(await all_of(self._ensure_share(s, wanted_of[s], read_rows) for s in shares))

    def counts(self) -> LibraryCounts:
        """Counts of all workers together, as each of them last told."""
        return reduce(add, self._counts.values(), LibraryCounts())

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
        async with self._locks[share]:
            found = await self._call(share, "look_up", dict(wanted))
            if found is None:
                return 0
            missing, self._counts[share] = found
            num_there = len(wanted) - len(missing)
            for first in range(0, len(missing), BUILD_PROMPTS):
                keys = missing[first : first + BUILD_PROMPTS]
                rows = await read_rows({key: wanted[key] for key in keys})
                counts = await self._call(share, "add_rows", rows)
                if counts is None:
                    return num_there
                self._counts[share] = counts
                num_there += len(keys)
            return num_there

    async def _call(self, share: int, method: str, *args: Any) -> Any:
        """The answer; None when there was trouble. A worker that has died is asked again until Ray
        has restarted it, one that hangs is started again."""
        actor, deadline_s = self._actors[share], time.monotonic() + RESTART_S
        while share not in self._given_up:
            try:
                return await actor.call(method, *args, timeout_s=ANSWER_S)
            except NoAnswer as error:
                actor.restart()
                self._on_trouble(f"no histories: {error}; it is started again")
                return None
            except ActorGone as error:
                if time.monotonic() > deadline_s:
                    self._given_up.add(share)
                    self._on_trouble(f"no more histories from a worker: {error}; it is given up")
                await asyncio.sleep(_RETRY_S)
            except ActorError as error:
                if error.cause and not isinstance(error.cause, OSError):
                    raise
                self._on_trouble(f"no histories: {error}")
                return None
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
