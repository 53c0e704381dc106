"""The history worker of one node: the index files of its prompts, and copies of the others'.

    rows of the store ─► own files ─pack─► object store ─take─► files on nodes that do not see them

Each worker leaves a mark beside its files: who sees the mark sees the files, and needs no copy.
"""

import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from engines.histospec.index_file import MARK, index_path, replace_file, shared_dir
from engines.histospec.library import IndexLibrary, PromptHistory, delete_indexes
from engines.histospec.shared import SharedLibrary, follow_list, missing_shared
from schemas.counts import LibraryCounts
from schemas.drafting import DraftingConfig

SHARING_WORKERS = 4
"""Workers that write shared indexes, at most: engines ask each of their files."""
PART_BYTES = 16 * 2**20
"""Bytes of one object of Ray's with index files, about."""
_NICENESS = 10
"""Niceness of a worker: building gives way to whatever else the node does."""


class Offer(NamedTuple):
    """Files of a worker, for nodes that do not see them."""

    mark: str
    """Text that is beside its files."""
    shared: str
    """Text of its list of shared files; empty: it has none."""


class HistoryWorker:
    """A process of its own, at low priority and on few cores."""

    def __init__(
        self,
        directory: Path,
        config: DraftingConfig,
        share: int,
        num_shares: int,
        epoch_steps: int = 0,
        begun: str = "",
    ) -> None:
        """`epoch_steps`: see `SharedLibrary`; `begun`: name of a start with nothing to go on from,
        at which indexes are of an earlier run."""
        self._num_threads = keep_to(config.index_cpus)
        num_sharing = min(num_shares, SHARING_WORKERS)
        own_bytes = {
            "max_index_bytes": config.max_index_bytes // num_shares,
            "shared_tokens": config.shared_tokens // num_sharing if share < num_sharing else 0,
        }
        self._directory, self._config = directory, config.model_copy(update=own_bytes)
        self._share, self._num_shares = share, num_shares
        self._mark = secrets.token_hex(16)
        if begun and _text(directory / f"run{MARK}") != begun:
            delete_indexes(directory)
            replace_file(directory / f"run{MARK}", begun.encode())
        self._libraries: dict[int, IndexLibrary] = {}
        """Libraries by share: of its own files, and of those of workers that it does not see."""
        self._own = self._library_of(share)
        self._shared = SharedLibrary(directory, self._config, epoch_steps, share)

    def look_up(self, wanted: Mapping[str, int]) -> tuple[list[str], LibraryCounts]:
        return self._own.missing(wanted), self.counts()

    def add_rows(self, rows: pa.Table) -> LibraryCounts:
        found = histories(rows)
        self._own.add(found)
        self._shared.add(found)
        return self.counts()

    def counts(self) -> LibraryCounts:
        """Counts of all files on this node that are in its charge."""
        return sum((it.counts() for it in self._libraries.values()), LibraryCounts())

    def offer(self) -> Offer:
        """Leave the mark, and tell it."""
        replace_file(self._mark_of(self._share), self._mark.encode())
        return Offer(self._mark, self._shared.listed)

    def sees(self, marks: Mapping[int, str]) -> set[int]:
        """Those of these workers, by their marks, whose files are on this node."""
        return {share for share, mark in marks.items() if _text(self._mark_of(share)) == mark}

    def lacking(self, share: int, wanted: Mapping[str, int], listed: str) -> list[str]:
        """Names of the files of another worker that are not here: of these prompts, from the step
        given for each, and those that its list of shared files names."""
        missing = self._library_of(share).missing(wanted)
        prompts = [index_path(Path(), key) for key in missing]
        return [str(path) for path in (*prompts, *missing_shared(self._directory, listed))]

    def pack(self, names: Sequence[str]) -> tuple[int, dict[str, np.ndarray]]:
        """How many of these names of its files, from the first on, fill one object, and the files.
        One that has gone meanwhile is left out."""
        files: dict[str, np.ndarray] = {}
        num_names = 0
        while num_names < len(names) and sum(map(len, files.values())) < PART_BYTES:
            name = names[num_names]
            with suppress(FileNotFoundError):
                files[name] = np.fromfile(self._directory / name, np.uint8)
            num_names += 1
        return num_names, files

    def take(
        self, share: int, files: Mapping[str, np.ndarray], names: Collection[str]
    ) -> LibraryCounts:
        """Keep those of another worker's files that have these names."""
        for name in files.keys() & set(names):
            path = self._directory / name
            if path.parent == shared_dir(self._directory):
                replace_file(path, files[name].data)
            else:
                self._library_of(share).take(path.stem, files[name])
        return self.counts()

    def share_files(self, share: int, listed: str) -> LibraryCounts:
        """Have engines read another worker's shared files by its list, now that they are here."""
        follow_list(self._directory, share, listed)
        return self.counts()

    def _library_of(self, share: int) -> IndexLibrary:
        def owns(key: str) -> bool:
            return share_of(key, self._num_shares) == share

        if share not in self._libraries:
            library = IndexLibrary(self._directory, self._config, owns, self._num_threads)
            self._libraries[share] = library
        return self._libraries[share]

    def _mark_of(self, share: int) -> Path:
        return self._directory / f"{share}{MARK}"


def keep_to(num_cpus: int | None) -> int:
    """Have this thread, and those that it starts, use the last cores that it may use, at low
    priority: so many or, with None, a quarter of them. Returns how many."""
    cores = sorted(os.sched_getaffinity(0))
    kept = cores[-(num_cpus or max(1, len(cores) // 4)) :]
    os.sched_setaffinity(0, kept)
    os.nice(_NICENESS)
    return len(kept)


def share_of(prompt_key: str, num_shares: int) -> int:
    return int(prompt_key[:8], 16) % num_shares


def _text(path: Path) -> str:
    """Text of a file; empty where there is none."""
    with suppress(FileNotFoundError):
        return path.read_text()
    return ""


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
