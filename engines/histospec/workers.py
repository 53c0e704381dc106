"""History workers: Ray CPU actors, one for each node, that maintain the index files of a run.

    wanted {prompt: step} ─► missing? ─► rows of the store ─► build ─► files ◄─ mapped by engines
                                                                        │
                                       nodes that do not see the files ◄┘ copies

One call, `ensure`, covers all cases: newly scored rollouts, prompts that return after an eviction,
damaged or deleted files, a restart. Each worker builds for the prompts whose key hashes to it. If
nodes share no directory, workers copy missing files to each other by reference.

Histories are optional, so a failure is reported and costs speed only. A worker that dies or hangs
is restarted and finds its files. A worker that does not come back is given up.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from refrain.engines.actors import ActorError, ActorGone, NoAnswer, RemoteActor
from refrain.engines.bounded import gather_all
from refrain.engines.histospec.index_file import DamagedIndex
from refrain.engines.histospec.worker import HistoryWorker, Offer, share_of
from refrain.schemas.counts import LibraryCounts
from refrain.schemas.drafting import DraftingConfig

ANSWER_S = 120.0
"""Timeout of one call to a worker, its start included. A worker that exceeds it is restarted."""
RESTART_S = 30.0
"""Longest wait for Ray to restart a dead worker."""
MAX_RESTARTS = 20
"""Most restarts of one worker in a run."""
_RETRY_S = 0.5
BUILD_PROMPTS = 32
"""Number of prompts whose rollouts are read from the store and indexed at a time."""

ReadRows = Callable[[Mapping[str, int]], Awaitable[Any]]
"""Reads rollouts from the store. {prompt key: step} -> a table `engines.store.tables.INDEXED`,
sorted by prompt, or a Ray object reference to it."""


class HistoryWorkers:
    """Handle of the history workers in the driver. Needs Ray."""

    def __init__(
        self,
        directory: Path,
        config: DraftingConfig,
        on_trouble: Callable[[str], None],
        name: str | None = None,
    ) -> None:
        """`name`: prefix of the names by which other processes find the actors; their numbers
        follow."""
        self._directory, self._config, self._on_trouble = directory, config, on_trouble
        self._name = name
        self._actors: list[RemoteActor] = []
        self._locks: list[asyncio.Lock] = []
        self._copying = asyncio.Lock()
        self._counts: dict[int, LibraryCounts] = {}
        self._given_up: set[int] = set()
        """Workers that did not come back."""
        self._tasks: set[asyncio.Task] = set()

    def start(self, epoch_steps: int = 0, *, anew: bool = False) -> None:
        """Start the workers.

        `epoch_steps`: steps of an epoch, if known.
        `anew`: whether the run starts fresh. Then the workers delete the indexes of an earlier run.
        """
        import ray

        begun = secrets.token_hex(16) if anew else ""
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
                begun,
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
        """Use the workers that another process has started."""
        self._take(
            [RemoteActor.of(f"history worker {share}", actor) for share, actor in enumerate(actors)]
        )

    def _take(self, actors: list[RemoteActor]) -> None:
        self._actors = actors
        self._locks = [asyncio.Lock() for _ in actors]

    def prepare(self, wanted: Mapping[str, int], read_rows: ReadRows) -> asyncio.Task[int]:
        """Start `ensure` in the background. The task goes on when the caller stops waiting for
        it."""
        task = asyncio.create_task(self.ensure(wanted, read_rows))
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._on_trouble(f"the histories were not indexed: {error!r}")

    async def ensure(self, wanted: Mapping[str, int], read_rows: ReadRows) -> int:
        """Build an index of each prompt from its given step; return how many prompts have one.

        A worker builds for one call at a time, so an index that two calls want is built once.
        """
        shares = range(len(self._actors))
        wanted_of = {
            share: {key: s for key, s in wanted.items() if share_of(key, len(shares)) == share}
            for share in shares
        }
        num_there = await gather_all(self._ensure_share(s, wanted_of[s], read_rows) for s in shares)
        if len(shares) > 1:
            async with self._copying:
                await self._copy(wanted_of)
        return sum(num_there)

    def counts(self) -> LibraryCounts:
        """Return the counts of all workers together, as last reported by each."""
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

    async def _copy(self, wanted_of: Mapping[int, Mapping[str, int]]) -> None:
        """Copy the files to every node. Of the nodes that see each other's files, one gets the
        copy."""
        offers: dict[int, Offer] = await self._ask_all(wanted_of, "offer")
        marks = {share: offer.mark for share, offer in offers.items()}
        seen: dict[int, set[int]] = await self._ask_all(offers, "sees", marks)
        takers = [share for share, sees in seen.items() if share == min(sees, default=share)]
        await gather_all(
            self._spread(
                share, [t for t in takers if share not in seen[t]], wanted_of[share], offer
            )
            for share, offer in offers.items()
        )

    async def _spread(
        self, share: int, takers: Sequence[int], wanted: Mapping[str, int], offer: Offer
    ) -> None:
        """Copy the files of one worker to the nodes of others."""
        shared = offer.shared
        lacking: dict[int, list[str]]
        lacking = await self._ask_all(takers, "lacking", share, dict(wanted), shared)
        names = sorted(set().union(*lacking.values()))
        while names and (packed := await self._pack(share, names)):
            num_packed, files = packed
            part = set(names[:num_packed])
            takes = {t: part.intersection(lacks) for t, lacks in lacking.items()}
            await gather_all(
                self._tell(t, "take", share, files, own) for t, own in takes.items() if own
            )
            names = names[num_packed:]
        if not names:
            await gather_all(self._tell(t, "share_files", share, shared) for t in lacking)

    async def _tell(self, share: int, method: str, *args: Any) -> None:
        """Call a method that returns the worker's counts, and store these."""
        if counts := await self._ask(share, method, *args):
            self._counts[share] = counts

    async def _ask_all(self, shares: Collection[int], method: str, *args: Any) -> dict[int, Any]:
        """Return the answers of these workers by share, without those that failed."""
        answers = await gather_all(self._ask(share, method, *args) for share in shares)
        return {s: answer for s, answer in zip(shares, answers, strict=True) if answer is not None}

    async def _ask(self, share: int, method: str, *args: Any) -> Any:
        """Return the answer of a worker, or None if the worker was given up or failed."""
        if share in self._given_up:
            return None
        try:
            async with self._locks[share]:
                return await self._actors[share].call(method, *args, timeout_s=ANSWER_S)
        except ActorError as error:
            return self._not_copied(error)

    async def _pack(self, share: int, names: Sequence[str]) -> tuple[int, Any] | None:
        """Return how many of these files were packed, and a reference to them. None if the worker
        failed."""
        try:
            async with self._locks[share]:
                return await self._actors[share].call_with_reference(
                    "pack", names, timeout_s=ANSWER_S
                )
        except ActorError as error:
            return self._not_copied(error)

    def _not_copied(self, error: ActorError) -> None:
        """Report a failure to copy, or raise an error that is a bug. A worker that hangs is
        restarted at its next build, in `_call`."""
        if error.cause and not isinstance(error.cause, (OSError, DamagedIndex)):
            raise error
        self._on_trouble(f"the histories were not copied to all nodes: {error}")

    async def _call(self, share: int, method: str, *args: Any) -> Any:
        """Return the answer of a worker, or None if it failed. Retry a dead worker until Ray has
        restarted it. Restart one that hangs."""
        actor, deadline_s = self._actors[share], time.monotonic() + RESTART_S
        while share not in self._given_up:
            try:
                return await actor.call(method, *args, timeout_s=ANSWER_S)
            except NoAnswer as error:
                actor.restart()
                self._on_trouble(f"prompts have no new histories: {error}; the worker is restarted")
                return None
            except ActorGone as error:
                if time.monotonic() > deadline_s:
                    self._given_up.add(share)
                    self._on_trouble(f"a history worker did not come back and is given up: {error}")
                await asyncio.sleep(_RETRY_S)
            except ActorError as error:
                if error.cause and not isinstance(error.cause, OSError):
                    raise
                self._on_trouble(f"prompts have no new histories: {error}")
                return None
        return None
