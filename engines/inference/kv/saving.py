"""Save the keys and values of requests that leave an engine.

    (ahead)   each rank starts to write full blocks while the engine goes on (`precopy`)
    pause     the engine finishes its step; no request loses a block
    export    each rank writes its heads, except blocks that it saved ahead (`files`)
    (abort)   withdrawn requests end here with their tokens so far; copied requests go on
    resume    the engine goes on

If something cannot be saved, the next engine computes it again, which only takes longer. So we
delete copies of requests after a minute, whether or not an engine has read them.
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refrain.engines.bounded import wait_for
from refrain.engines.shared_memory import PrivateDir
from refrain.schemas.counts import KVCounts
from refrain.schemas.rollout import RequestId, RolloutRequest, SavedKV

logger = logging.getLogger(__name__)

AHEAD_S = 60.0
"""Longest wait for blocks to be saved ahead. The export saves those that are late."""
COPIES_KEPT_S = 60.0
"""Age at which copies may be deleted to make room for later ones."""
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class KVSource(SavedKV):
    """Keys and values that the engine which continues the request looks for."""

    name: str
    """Name of the request."""
    policy_version: int
    """Policy version that must have computed them."""


class KVSaving:
    """Saves the keys and values of one engine. `llm`: its `AsyncLLM`."""

    def __init__(self, llm: Any, tp_degree: int) -> None:
        self._llm = llm
        self._tp_degree = tp_degree
        self._dir: PrivateDir | None = None
        self._num_directories = 0
        self._ahead: Path | None = None
        """Directory of the next withdrawal, if blocks for it were saved ahead."""
        self._copies: dict[Path, float] = {}
        """Time (`time.monotonic`) at which copies were saved, by their directory."""
        self._one_at_a_time = asyncio.Lock()
        self._counts = KVCounts()
        self._loads = False
        """Whether requests with keys and values arrived since the last `take_counts`."""

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncGenerator[None]:
        """Pause the engine: it runs no step during the block."""
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

    async def save_ahead(
        self, num_tokens: Mapping[RequestId, int], policy_version: int
    ) -> SavedKV | None:
        """Save the full blocks of requests that will leave soon, while they go on.

        Return where other engines of the node find them, or None if nothing was saved.
        """
        if not num_tokens:
            return None
        async with self._one_at_a_time:
            started_s = time.perf_counter()
            try:
                directory = self._ahead = self._ahead or self._new_directory()
                named = {str(id): num for id, num in num_tokens.items()}
                files = await self._llm.collective_rpc(
                    "save_kv_ahead", args=(str(directory), named, policy_version)
                )
                num_bytes = await _sizes([Path(file) for file in files if file])
            except OSError as error:
                logger.warning("could not save keys and values ahead: %s", error)
                return None
            self._counts.num_bytes_ahead += num_bytes
            self._counts.ahead_s += time.perf_counter() - started_s
        return SavedKV(str(directory), sum(num_tokens.values()), self._tp_degree)

    async def expect(self, saved: Sequence[SavedKV], policy_version: int) -> None:
        """Map what other engines have saved ahead, for requests that will come from them."""
        places = [(one.path, one.tp_degree) for one in saved]
        await self._llm.collective_rpc("expect_kv", args=(places, policy_version))

    async def save(
        self, num_tokens: Mapping[RequestId, int], policy_version: int, *, copies: bool = False
    ) -> dict[RequestId, SavedKV]:
        """Save keys and values. Return where they are, for each request that could be saved.

        Call while the engine is paused.

        Args:
            num_tokens: tokens with keys and values of each request.
            policy_version: weights that computed them.
            copies: whether the requests also go on here. Blocks saved ahead are kept then, for
                when the requests leave.
        """
        if not num_tokens:
            return {}
        started_s = time.perf_counter()
        named = {str(id): num for id, num in num_tokens.items()}
        saved: set[str] = set()
        directory = None
        try:
            directory = self._directory_of_copies() if copies else self._directory_to_leave()
            saved = await self._export(directory, named, policy_version, with_ahead=not copies)
        except OSError as error:
            logger.warning("%d requests must be recomputed: %s", len(named), error)
            if directory:
                shutil.rmtree(directory, ignore_errors=True)
            self._counts.num_failures += 1
        seconds = time.perf_counter() - started_s
        if copies:
            self._counts.num_copied += len(saved)
            self._counts.copy_s += seconds
        else:
            self._counts.num_requests += len(named)
            self._counts.num_saved += len(saved)
            self._counts.export_s += seconds
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

    def _directory_to_leave(self) -> Path:
        directory, self._ahead = self._ahead or self._new_directory(), None
        return directory

    def _directory_of_copies(self) -> Path:
        now_s = time.monotonic()
        for old in [path for path, at_s in self._copies.items() if now_s - at_s > COPIES_KEPT_S]:
            del self._copies[old]
            shutil.rmtree(old, ignore_errors=True)
        directory = self._new_directory()
        self._copies[directory] = now_s
        return directory

    async def _export(
        self,
        directory: Path,
        num_tokens: Mapping[str, int],
        policy_version: int,
        *,
        with_ahead: bool,
    ) -> set[str]:
        """Let all ranks write. Return the names of requests that all ranks have saved.

        Raise OSError if a rank could not write.
        """
        replies = await self._llm.collective_rpc(
            "save_kv", args=(str(directory), num_tokens, policy_version, with_ahead)
        )
        errors = [error for _, _, error in replies if error]
        if errors:
            raise OSError("; ".join(errors))
        self._counts.num_bytes += sum(size for _, size, _ in replies)
        return set.intersection(*(set(names) for names, _, _ in replies))

    def clear(self) -> None:
        """Delete all files. Call when the weights change: old keys and values are useless then."""
        if self._dir:
            self._dir.delete()
            self._dir = self._ahead = None
            self._copies.clear()

    def note(self, requests: Sequence[RolloutRequest]) -> None:
        """Note whether any of these new requests has keys and values that the ranks will load."""
        self._loads |= any(request.kv for request in requests)

    async def take_counts(self) -> KVCounts:
        """Return the counts since the last call."""
        loads, self._loads = self._loads, False
        if loads:
            taken = await self._llm.collective_rpc("take_kv_loads")
            load_s, num_bytes = max((seconds, num_bytes) for num_bytes, seconds in taken)
            self._counts.num_bytes_loaded += num_bytes
            self._counts.load_s += load_s
        counts, self._counts = self._counts, KVCounts()
        return counts


async def _sizes(files: Sequence[Path]) -> int:
    """Wait until these files exist, at most `AHEAD_S`. Return their total bytes.

    Poll the directory: the engine would answer a call only between two steps.
    """

    async def there() -> None:
        while not all(file.exists() for file in files):
            await asyncio.sleep(_POLL_S)

    with contextlib.suppress(TimeoutError):
        await wait_for(there(), AHEAD_S)
    return sum(file.stat().st_size for file in files if file.exists())
