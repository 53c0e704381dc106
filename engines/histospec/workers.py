"""History workers: Ray CPU actors, one a node, that keep the index files of a run.

    wanted {prompt: step} ─► missing? ─► rows of the store ─► build ─► files ◄─ mapped by engines
                                                                        │
                                       nodes that do not see the files ◄┘ copies

There is one call, `ensure`, for everything: rollouts that were just scored, prompts that return
after an eviction, files that were damaged or deleted, a restart. Each worker looks after the
prompts whose key falls to it; where nodes have no directory in common, their workers pass each
other what is missing, by reference. Histories are optional: a worker that dies or hangs is started
again and finds its files, one that does not come back is given up, and what fails is reported and
costs speed only.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from engines.actors import ActorError, ActorGone, NoAnswer, RemoteActor
from engines.bounded import all_of
from engines.histospec.index_file import DamagedIndex
from engines.histospec.worker import HistoryWorker, Offer, share_of
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

ReadRows = Callable[[Mapping[str, int]], Awaitable[Any]]
"""{prompt key: step} -> a table `engines.store.tables.INDEXED` of these rollouts, by prompt, or a
Ray object reference to it."""


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
        self._copying = asyncio.Lock()
        self._counts: dict[int, LibraryCounts] = {}
        self._given_up: set[int] = set()
        """Workers that did not come back."""
        self._tasks: set[asyncio.Task] = set()

    def start(self, epoch_steps: int = 0, *, anew: bool = False) -> None:
        """`epoch_steps`: steps of an epoch, where it is known; `anew`: there is nothing to go on
        from, and indexes on any node are of an earlier run."""
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

        A worker builds for one call at a time: what two calls want is built once.
        """
        shares = range(len(self._actors))
        wanted_of = {
            share: {key: s for key, s in wanted.items() if share_of(key, len(shares)) == share}
            for share in shares
        }
        num_there = await all_of(self._ensure_share(s, wanted_of[s], read_rows) for s in shares)
        if len(shares) > 1:
            async with self._copying:
                await self._copy(wanted_of)
        return sum(num_there)

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

    async def _copy(self, wanted_of: Mapping[int, Mapping[str, int]]) -> None:
        """Have the files on every node; nodes that see each other's are given them once."""
        offers: dict[int, Offer] = await self._ask_all(wanted_of, "offer")
        marks = {share: offer.mark for share, offer in offers.items()}
        seen: dict[int, set[int]] = await self._ask_all(offers, "sees", marks)
        takers = [share for share, sees in seen.items() if share == min(sees, default=share)]
        await all_of(
            self._spread(
                share, [t for t in takers if share not in seen[t]], wanted_of[share], offer
            )
            for share, offer in offers.items()
        )

    async def _spread(
        self, share: int, takers: Sequence[int], wanted: Mapping[str, int], offer: Offer
    ) -> None:
        """Have the files of one worker on the nodes of others."""
        shared = offer.shared
        lacking: dict[int, list[str]]
        lacking = await self._ask_all(takers, "lacking", share, dict(wanted), shared)
        names = sorted(set().union(*lacking.values()))
        while names and (packed := await self._pack(share, names)):
            num_packed, files = packed
            part = set(names[:num_packed])
            takes = {t: part.intersection(lacks) for t, lacks in lacking.items()}
            await all_of(
                self._tell(t, "take", share, files, own) for t, own in takes.items() if own
            )
            names = names[num_packed:]
        if not names:
            await all_of(self._tell(t, "share_files", share, shared) for t in lacking)

    async def _tell(self, share: int, method: str, *args: Any) -> None:
        """Have a worker do what it answers with its counts."""
        if counts := await self._ask(share, method, *args):
            self._counts[share] = counts

    async def _ask_all(self, shares: Collection[int], method: str, *args: Any) -> dict[int, Any]:
        """Answers of these workers, where there was no trouble."""
        answers = await all_of(self._ask(share, method, *args) for share in shares)
        return {s: answer for s, answer in zip(shares, answers, strict=True) if answer is not None}

    async def _ask(self, share: int, method: str, *args: Any) -> Any:
        """The answer of a worker that is there; None when there was trouble."""
        if share in self._given_up:
            return None
        try:
            async with self._locks[share]:
                return await self._actors[share].call(method, *args, timeout_s=ANSWER_S)
        except ActorError as error:
            return self._not_copied(error)

    async def _pack(self, share: int, names: Sequence[str]) -> tuple[int, Any] | None:
        """How many names' files these are, and a reference to the files."""
        try:
            async with self._locks[share]:
                return await self._actors[share].call_aside("pack", names, timeout_s=ANSWER_S)
        except ActorError as error:
            return self._not_copied(error)

    def _not_copied(self, error: ActorError) -> None:
        """Raises what is no trouble but a mistake. A worker that hangs is started again when it is
        next to build."""
        if error.cause and not isinstance(error.cause, (OSError, DamagedIndex)):
            raise error
        self._on_trouble(f"histories were not copied to all nodes: {error}")

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
