"""Requests leave an engine with their keys and values.

    pause     the engine finishes the step that it is in; nobody loses a block
    export    each rank writes the heads that it has (`kv_files`)
    (abort)   the requests end here, with the tokens that they have
    resume    the others go on

What cannot be saved is computed again where the request goes: it only takes longer.
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.shared_memory import PrivateDir
from schemas.rollout import RequestId, SavedKV

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVSource(SavedKV):
    """Keys and values as the engine looks for them that is to go on with the request."""

    name: str
    """The request's."""
    policy_version: int
    """Weights that they must be of."""


@dataclass(slots=True)
class KVCounts:
    """Counts of leaving with keys and values on one engine, since it was last asked."""

    num_withdrawals: int = 0
    num_requests: int = 0
    """Requests that had keys and values to take along."""
    num_saved: int = 0
    num_failures: int = 0
    """Withdrawals of which nothing could be saved."""
    num_bytes: int = 0
    pause_s: float = 0.0
    """Seconds until the step under way was done."""
    export_s: float = 0.0
    resume_s: float = 0.0
    """Seconds until the engine was told to go on."""


class KVSaving:
    """Saving of keys and values of one engine; `llm` is its `AsyncLLM`."""

    def __init__(self, llm: Any, tp_degree: int) -> None:
        self._llm = llm
        self._tp_degree = tp_degree
        self._dir: PrivateDir | None = None
        self._num_directories = 0
        self._one_at_a_time = asyncio.Lock()
        self._counts = KVCounts()

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncGenerator[None]:
        """No step is taken meanwhile."""
        async with self._one_at_a_time:
            started_s = time.perf_counter()
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            self._counts.num_withdrawals += 1
            self._counts.pause_s += time.perf_counter() - started_s
            try:
                yield
            finally:
                started_s = time.perf_counter()
                await self._llm.resume_generation()
                self._counts.resume_s += time.perf_counter() - started_s

    async def save(
        self, num_tokens: Mapping[RequestId, int], policy_version: int
    ) -> dict[RequestId, SavedKV]:
        """Keys and values of those requests that could be saved; `num_tokens`: that have some."""
        if not num_tokens:
            return {}
        started_s = time.perf_counter()
        named = {str(id): num for id, num in num_tokens.items()}
        saved: set[str] = set()
        directory = None
        try:
            directory = self._new_directory()
            saved = await self._export(directory, named, policy_version)
        except OSError as error:
            logger.warning("%d requests are computed again: %s", len(named), error)
            if directory:
                shutil.rmtree(directory, ignore_errors=True)
            self._counts.num_failures += 1
        self._counts.num_requests += len(named)
        self._counts.num_saved += len(saved)
        self._counts.export_s += time.perf_counter() - started_s
        return {
            id: SavedKV(str(directory), num, self._tp_degree)
            for id, num in num_tokens.items()
            if str(id) in saved
        }

    def _new_directory(self) -> Path:
        self._dir = self._dir or PrivateDir()
        directory = self._dir.path / str(self._num_directories)
        self._num_directories += 1
        directory.mkdir()
        return directory

    async def _export(
        self, directory: Path, num_tokens: Mapping[str, int], policy_version: int
    ) -> set[str]:
        """Names of the requests that all ranks have. Raises OSError when a rank could not write."""
        replies = await self._llm.collective_rpc(
            "save_kv", args=(str(directory), num_tokens, policy_version)
        )
        errors = [error for _, _, error in replies if error]
        if errors:
            raise OSError("; ".join(errors))
        self._counts.num_bytes += sum(size for _, size, _ in replies)
        return set.intersection(*(set(names) for names, _, _ in replies))

    def clear(self) -> None:
        """Delete what was saved: keys and values of weights that are gone help nobody."""
        if self._dir:
            self._dir.delete()
            self._dir = None

    def take_counts(self) -> KVCounts:
        counts, self._counts = self._counts, KVCounts()
        return counts
