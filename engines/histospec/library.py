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
from engines.histospec.index_file import SUFFIX, DamagedIndex, index_path, open_index, write_index
from schemas.counts import LibraryCounts
from schemas.drafting import DraftingConfig


class PromptHistory(NamedTuple):
    """The responses of one prompt's last rollout."""

    prompt_key: str
    step: int
    prompt_token_ids: Sequence[int] | np.ndarray
    responses: Sequence[Sequence[int] | np.ndarray]
    rewards: Sequence[float]


def delete_indexes(directory: Path) -> None:
    """Delete the indexes in a directory and what engines learnt beside them, and nothing else."""
    for pattern in (f"*{SUFFIX}*", "engine-*.json"):
        for path in directory.glob(pattern):
            path.unlink()
    with suppress(OSError):  # It is not there, or somebody else has files in it.
        directory.rmdir()


class _State(NamedTuple):
    num_bytes: int
    modified_ns: int


@dataclass(slots=True)
class _Known:
    step: int
    state: _State
    used: int
    """Number of the call in which it was last wanted or built."""


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
        names = ("min_match", "max_match", "max_draft")
        self._sizes = {name: getattr(config, name) for name in names}
        self._known: dict[str, _Known] = {}
        self._counts = LibraryCounts()
        self._num_calls = 0
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
        self._num_calls += 1
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
            num_bytes=sum(known.state.num_bytes for known in self._known.values()),
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
            self._known.pop(key, None)
            self._counts += LibraryCounts(num_damaged=isinstance(error, DamagedIndex))
            return False
        self._known[key].used = self._num_calls
        return self._known[key].step == step

    def _remember(self, key: str, step: int, path: Path) -> None:
        self._known[key] = _Known(step, _state(path), self._num_calls)

    def _make_room(self) -> None:
        """Evict the least recently wanted. What an engine has mapped stays readable for it."""
        size = sum(known.state.num_bytes for known in self._known.values())
        if size <= self._max_bytes:
            return
        for key in sorted(self._known, key=lambda key: self._known[key].used):
            index_path(self._directory, key).unlink(missing_ok=True)
            self._counts += LibraryCounts(num_evicted=1)
            size -= self._known.pop(key).state.num_bytes
            if size <= self._max_bytes:
                return


_UNCHECKED, _OTHER_SETTINGS = -1, -2
"""Marks of an index file whose step is not known, in the place of the step."""


def _state(path: Path) -> _State:
    stat = path.stat()
    return _State(stat.st_size, stat.st_mtime_ns)
