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
from engines.histospec.index_file import SUFFIX, DamagedIndex, check_index, index_path, write_index
from schemas.counts import LibraryCounts


class PromptHistory(NamedTuple):
    """The responses of one prompt's last rollout."""

    prompt_key: str
    step: int
    prompt_token_ids: Sequence[int] | np.ndarray
    responses: Sequence[Sequence[int] | np.ndarray]
    rewards: Sequence[float]


@dataclass(slots=True)
class _Known:
    step: int
    num_bytes: int
    modified_ns: int
    used: int
    """Number of the call in which it was last wanted or built."""


class IndexLibrary:
    """Index files of one directory. Not thread-safe: one call at a time."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        min_match: int = 3,
        max_match: int = 7,
        max_draft: int = 32,
        owns: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`max_bytes`: of all files together. `owns`: the prompts whose files it looks after."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._sizes = {"min_match": min_match, "max_match": max_match, "max_draft": max_draft}
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
            index = build_index(
                history.prompt_token_ids, history.responses, history.rewards, **self._sizes
            )
            path = index_path(self._directory, history.prompt_key)
            write_index(index, history.prompt_key, path, history.step)
            self._remember(history.prompt_key, history.step, path)
            self._make_room()
        self._count(num_built=len(histories), build_s=time.perf_counter() - started_s)

    def counts(self) -> LibraryCounts:
        return replace(
            self._counts,
            num_indexes=len(self._known),
            num_bytes=sum(known.num_bytes for known in self._known.values()),
        )

    def _is_there(self, key: str, step: int) -> bool:
        path, known = index_path(self._directory, key), self._known.get(key)
        try:
            state = path.stat()
            if known is None or (known.num_bytes, known.modified_ns) != _state(state):
                known = None
            if known is None or known.step == _UNCHECKED:
                found = check_index(path, key)
                alike = all(found[name] == size for name, size in self._sizes.items())
                self._remember(key, found["step"] if alike else _OTHER_SETTINGS, path)
        except OSError:
            # Not there, or not to be read; if it cannot be replaced either, `add` says so.
            self._known.pop(key, None)
            return False
        except DamagedIndex:
            self._known.pop(key, None)
            self._count(num_damaged=1)
            return False
        self._known[key].used = self._num_calls
        return self._known[key].step == step

    def _remember(self, key: str, step: int, path: Path) -> None:
        num_bytes, modified_ns = _state(path.stat())
        self._known[key] = _Known(step, num_bytes, modified_ns, self._num_calls)

    def _make_room(self) -> None:
        """Evict the least recently wanted. What an engine has mapped stays readable for it."""
        size = sum(known.num_bytes for known in self._known.values())
        if size <= self._max_bytes:
            return
        for key in sorted(self._known, key=lambda key: self._known[key].used):
            size -= self._evict(key)
            if size <= self._max_bytes:
                return

    def _evict(self, key: str) -> int:
        """Delete an index; returns the bytes that are free now."""
        with suppress(FileNotFoundError):
            index_path(self._directory, key).unlink()
        self._count(num_evicted=1)
        return self._known.pop(key).num_bytes

    def _count(self, **changes: float) -> None:
        old = {name: getattr(self._counts, name) for name in changes}
        self._counts = replace(
            self._counts, **{name: old[name] + change for name, change in changes.items()}
        )


_UNCHECKED, _OTHER_SETTINGS = -1, -2
"""Marks of an index file whose step is not known, in the place of the step."""


def _state(stat) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns
