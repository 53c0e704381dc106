"""Index files of a run: which exist, which are missing, and which may be deleted.

    built, or taken from another node ─► whole ◄─ wanted ─┐
                                           └─ no room ─► compressed ─ no room ─► deleted

A deleted index is built again when its prompt returns. Only the files are durable, so a restart
scans them again. A file is trusted after its checksum was verified, as long as its size and
modification time stay the same. Several libraries may share a directory, each with its own prompts.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from refrain.engines.histospec.index import Tokens, Turns, build_index
from refrain.engines.histospec.index_file import (
    COLD,
    LIST,
    MARK,
    SUFFIX,
    DamagedIndex,
    cold_path,
    compress,
    decompress,
    index_path,
    open_index,
    replace_file,
    shared_dir,
    write_index,
)
from refrain.engines.private import require_own
from refrain.schemas.counts import LibraryCounts
from refrain.schemas.drafting import DraftingConfig


class PromptHistory(NamedTuple):
    """Responses of one prompt's last rollouts."""

    prompt_key: str
    step: int
    prompt_token_ids: Tokens
    responses: Sequence[Tokens]
    rewards: Sequence[float]
    turns: Sequence[Turns] = ()
    """Turns of each response. Empty: no response has turns."""


def index_sizes(config: DraftingConfig) -> dict[str, int]:
    """Return the settings that an index is built with."""
    return {
        "min_match": config.min_match,
        "max_match": config.max_match,
        "max_draft": config.max_draft,
    }


def delete_indexes(directory: Path) -> None:
    """Delete the indexes in a directory, including the shared ones, and nothing else."""
    shared = shared_dir(directory)
    for path in (
        *shared.glob(f"*{LIST}"),
        *shared.glob(f"*{SUFFIX}*"),
        *directory.glob(f"*{SUFFIX}*"),
        *directory.glob(f"*{MARK}"),
    ):
        path.unlink()
    for emptied in (shared, directory):
        with suppress(OSError):  # The directory is missing, or holds other files.
            emptied.rmdir()


class _State(NamedTuple):
    num_bytes: int
    modified_ns: int


@dataclass(slots=True)
class _Known:
    step: int
    state: _State
    is_cold: bool


@dataclass(slots=True)
class _Returning:
    """Prompt keys by the step of their index. Each epoch has every prompt once, so the most recent
    prompts return last."""

    _keys_of: dict[int, dict[str, None]] = field(default_factory=dict)
    """Keys of each step, in order of arrival."""

    def add(self, key: str, step: int) -> None:
        self._keys_of.setdefault(step, {})[key] = None

    def remove(self, key: str, step: int) -> None:
        of_step = self._keys_of[step]
        del of_step[key]
        if not of_step:
            del self._keys_of[step]

    @property
    def newest(self) -> int:
        return max(self._keys_of, default=0)

    def last(self, but: Iterable[set[str]] = ()) -> str | None:
        """Return the key that returns last, of those in none of these sets."""
        for step in sorted(self._keys_of, reverse=True):
            for key in reversed(self._keys_of[step]):
                if not any(key in kept for kept in but):
                    return key
        return None


class IndexLibrary:
    """Index files of one directory. Not thread-safe: make one call at a time."""

    def __init__(
        self,
        directory: Path,
        config: DraftingConfig,
        owns: Callable[[str], bool] = lambda _: True,
        num_threads: int = 1,
    ) -> None:
        """`owns`: returns whether this library manages the files of a prompt.
        `num_threads`: threads that build indexes."""
        self._directory = directory
        self._max_bytes = config.max_index_bytes
        self._sizes = index_sizes(config)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="indexes")
        self._known: dict[str, _Known] = {}
        self._whole, self._cold = _Returning(), _Returning()
        self._soon: deque[set[str]] = deque(maxlen=2)
        """Keys of the last look-ups. Engines are about to draft from these."""
        self._num_bytes = 0
        self._counts = LibraryCounts()
        require_own(directory)
        directory.mkdir(0o700, parents=True, exist_ok=True)
        for path in directory.glob(f"*{SUFFIX}*"):
            key = path.name.partition(".")[0]
            if owns(key):
                self._find(key, path)

    def missing(self, wanted: Mapping[str, int]) -> list[str]:
        """Return the keys of prompts whose index is missing, damaged, or of another step than
        `wanted` gives for it. Restore wanted indexes that are compressed."""
        newest = max(self._whole.newest, self._cold.newest)
        missing = [key for key, step in wanted.items() if not self._is_there(key, step)]
        lacking = set(missing)
        # An index of the newest step that is still missing belongs to a prompt that was just rolled
        # out. This prompt returns last, so do not protect it from eviction.
        self._soon.append({k for k, step in wanted.items() if k not in lacking or step < newest})
        self._make_room()
        return missing

    def add(self, histories: Sequence[PromptHistory]) -> None:
        """Index the prompts and replace their old indexes; then make room."""
        builds = self._threads.map(self._build, histories)
        for history, build_s in zip(histories, builds, strict=True):
            self._hold(history.prompt_key, history.step)
            self._counts += LibraryCounts(num_built=1, build_s=build_s)
            self._make_room()

    def take(self, key: str, content: np.ndarray) -> None:
        """Store an index that another library built, given the bytes of its file. Raise
        `DamagedIndex`."""
        path = index_path(self._directory, key)
        replace_file(path, content.data)
        self._hold(key, open_index(path, key).step)
        self._counts += LibraryCounts(num_copied=1)
        self._make_room()

    def counts(self) -> LibraryCounts:
        return replace(
            self._counts,
            num_indexes=len(self._known),
            num_bytes=self._num_bytes,
        )

    def _build(self, history: PromptHistory) -> float:
        started_s = time.perf_counter()
        key, step, prompt, responses, rewards, turns = history
        index = build_index(prompt, responses, rewards, turns=turns, **self._sizes, step=step)
        write_index(index, key, index_path(self._directory, key))
        return time.perf_counter() - started_s

    def _find(self, key: str, path: Path) -> None:
        """Register a file that already exists, or delete it if a crash left it incomplete."""
        if path.suffix not in (SUFFIX, COLD):
            path.unlink(missing_ok=True)
        elif path.suffix == SUFFIX or key not in self._known:
            self._remember(key, _UNCHECKED, path)

    def _is_there(self, key: str, step: int) -> bool:
        path, known = index_path(self._directory, key), self._known.get(key)
        try:
            if known and known.is_cold and known.step in (step, _UNCHECKED):
                decompress(cold_path(self._directory, key), path)
                self._counts += LibraryCounts(num_restored=1)
            elif known and known.is_cold:
                return False
            if known is None or known.step == _UNCHECKED or known.state != _state(path):
                found = open_index(path, key)
                alike = all(getattr(found, name) == size for name, size in self._sizes.items())
                self._remember(key, found.step if alike else _OTHER_SETTINGS, path)
        except (OSError, DamagedIndex) as error:
            # The file is missing or cannot be read. If it cannot be replaced either, `add` raises.
            self._forget(key)
            self._counts += LibraryCounts(num_damaged=isinstance(error, DamagedIndex))
            return False
        return self._known[key].step == step

    def _hold(self, key: str, step: int) -> None:
        """Register a new index and delete the compressed old one."""
        cold_path(self._directory, key).unlink(missing_ok=True)
        self._remember(key, step, index_path(self._directory, key))

    def _remember(self, key: str, step: int, path: Path) -> None:
        self._forget(key)
        self._known[key] = known = _Known(step, _state(path), path.suffix == COLD)
        self._order_of(known).add(key, step)
        self._num_bytes += known.state.num_bytes

    def _forget(self, key: str) -> None:
        if known := self._known.pop(key, None):
            self._num_bytes -= known.state.num_bytes
            self._order_of(known).remove(key, known.step)

    def _order_of(self, known: _Known) -> _Returning:
        return self._cold if known.is_cold else self._whole

    def _make_room(self) -> None:
        """Compress the indexes that return last, then evict them. Engines can still read what they
        have mapped."""
        while self._num_bytes > self._max_bytes:
            if key := self._whole.last(self._soon):
                self._compress(key)
            else:
                self._evict(self._cold.last() or self._whole.last())

    def _compress(self, key: str) -> None:
        cold, step = cold_path(self._directory, key), self._known[key].step
        try:
            compress(index_path(self._directory, key), cold)
        except FileNotFoundError:
            self._forget(key)
            return
        self._remember(key, step, cold)
        self._counts += LibraryCounts(num_compressed=1)

    def _evict(self, key: str | None) -> None:
        assert key is not None, "there are bytes of nothing"
        for path in (index_path(self._directory, key), cold_path(self._directory, key)):
            path.unlink(missing_ok=True)
        self._counts += LibraryCounts(num_evicted=1)
        self._forget(key)


_UNCHECKED, _OTHER_SETTINGS = -1, 2**62
"""Placeholders for a step: the file was not opened yet, or was built with other settings."""


def _state(path: Path) -> _State:
    stat = path.stat()
    return _State(stat.st_size, stat.st_mtime_ns)
