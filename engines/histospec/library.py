"""The index files of a run: which there are, which are missing, and which may go.

Nothing but the files themselves is durable: a restart looks at them again. A file is trusted once
its checksum was right, and for as long as its size and time stay what they were. Several libraries
may share a directory, each with prompts of its own.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engines.histospec.index import build_index
from engines.histospec.index_file import (
    LIST,
    SUFFIX,
    DamagedIndex,
    index_path,
    open_index,
    shared_dir,
    write_index,
)
from schemas.counts import LibraryCounts
from schemas.drafting import DraftingConfig


class PromptHistory(NamedTuple):
    """The responses of one prompt's last rollout."""

    prompt_key: str
    step: int
    prompt_token_ids: Sequence[int] | np.ndarray
    responses: Sequence[Sequence[int] | np.ndarray]
    rewards: Sequence[float]


def index_sizes(config: DraftingConfig) -> dict[str, int]:
    """Settings that an index is built with."""
    return {name: getattr(config, name) for name in ("min_match", "max_match", "max_draft")}


def delete_indexes(directory: Path) -> None:
    """Delete the indexes in a directory, the shared ones too, and nothing else."""
    shared = shared_dir(directory)
    for path in (
        *shared.glob(f"*{LIST}"),
        *shared.glob(f"*{SUFFIX}*"),
        *directory.glob(f"*{SUFFIX}*"),
    ):
        path.unlink()
    for emptied in (shared, directory):
        with suppress(OSError):  # It is not there, or somebody else has files in it.
            emptied.rmdir()


class _State(NamedTuple):
    num_bytes: int
    modified_ns: int


@dataclass(slots=True)
class _Known:
    step: int
    state: _State


class IndexLibrary:
    """Index files of one directory. Not thread-safe: one call at a time."""

    def __init__(
        self,
        directory: Path,
        config: DraftingConfig,
        owns: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`owns`: the prompts whose files it looks after."""
        self._directory = directory
        self._max_bytes = config.max_index_bytes
        self._sizes = index_sizes(config)
        self._known: dict[str, _Known] = {}
        self._keys_of: dict[int, dict[str, None]] = {}
        """Keys of the indexes by step, in the order in which they came."""
        self._num_bytes = 0
        self._counts = LibraryCounts()
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(f"*{SUFFIX}*"):
            key = path.name.partition(".")[0]
            if not owns(key):
                continue
            if path.suffix == SUFFIX:
                self._remember(key, _UNCHECKED, path)
            else:
                # A crash left it half written.
                path.unlink(missing_ok=True)

    def missing(self, wanted: Mapping[str, int]) -> list[str]:
        """Keys of the prompts, given with the step that each index is to be from, that have no
        index, an older or newer one, or a damaged one."""
        return [key for key, step in wanted.items() if not self._is_there(key, step)]

    def add(self, histories: Sequence[PromptHistory]) -> None:
        """Index the prompts, each replacing the index that it had; then make room."""
        started_s = time.perf_counter()
        for history in histories:
            key, step, prompt, responses, rewards = history
            index = build_index(prompt, responses, rewards, **self._sizes, step=step)
            path = index_path(self._directory, key)
            write_index(index, key, path)
            self._remember(key, step, path)
            self._make_room()
        build_s = time.perf_counter() - started_s
        self._counts += LibraryCounts(num_built=len(histories), build_s=build_s)

    def counts(self) -> LibraryCounts:
        return replace(
            self._counts,
            num_indexes=len(self._known),
            num_bytes=self._num_bytes,
        )

    def _is_there(self, key: str, step: int) -> bool:
        path, known = index_path(self._directory, key), self._known.get(key)
        try:
            if known is None or known.step == _UNCHECKED or known.state != _state(path):
                found = open_index(path, key)
                alike = all(getattr(found, name) == size for name, size in self._sizes.items())
                self._remember(key, found.step if alike else _OTHER_SETTINGS, path)
        except (OSError, DamagedIndex) as error:
            # Not there, or not to be read: if it cannot be replaced either, `add` says so.
            self._forget(key)
            self._counts += LibraryCounts(num_damaged=isinstance(error, DamagedIndex))
            return False
        return self._known[key].step == step

    def _remember(self, key: str, step: int, path: Path) -> None:
        self._forget(key)
        self._known[key] = known = _Known(step, _state(path))
        self._keys_of.setdefault(step, {})[key] = None
        self._num_bytes += known.state.num_bytes

    def _forget(self, key: str) -> None:
        if known := self._known.pop(key, None):
            self._num_bytes -= known.state.num_bytes
            of_step = self._keys_of[known.step]
            del of_step[key]
            if not of_step:
                del self._keys_of[known.step]

    def _make_room(self) -> None:
        """Evict the indexes of the latest steps: each epoch has every prompt once, so what was
        rolled out last returns last. What an engine has mapped stays readable for it."""
        while self._num_bytes > self._max_bytes:
            key = next(reversed(self._keys_of[max(self._keys_of)]))
            index_path(self._directory, key).unlink(missing_ok=True)
            self._counts += LibraryCounts(num_evicted=1)
            self._forget(key)


_UNCHECKED, _OTHER_SETTINGS = -1, 2**62
"""Marks in the place of a step: nobody has looked at the file yet, or it is of no use."""


def _state(path: Path) -> _State:
    stat = path.stat()
    return _State(stat.st_size, stat.st_mtime_ns)
