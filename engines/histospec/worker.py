"""History worker of one node. It manages the index files of its prompts, and copies of other
workers'.

    rows of the store ─► own files ─pack─► object store ─take─► files on nodes that do not see them

Each worker writes a mark beside its files. A worker that sees the mark sees the files too, for
example on a network drive, and needs no copy.
"""

import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from shutil import disk_usage
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from refrain.engines.histospec.index import turn_sizes
from refrain.engines.histospec.index_file import MARK, index_path, replace_file, shared_dir
from refrain.engines.histospec.library import IndexLibrary, PromptHistory, delete_indexes
from refrain.engines.histospec.shared import SharedLibrary, follow_list, missing_shared
from refrain.schemas.counts import LibraryCounts
from refrain.schemas.drafting import DraftingConfig

SHARING_WORKERS = 4
"""Most workers that write shared indexes. Engines search the files of each one."""
PART_BYTES = 16 * 2**20
"""Approximate bytes of index files in one Ray object."""
_NICENESS = 10
"""Niceness of a worker, so that building yields to everything else on the node."""


class Offer(NamedTuple):
    """Files of one worker, offered to nodes that do not see them."""

    mark: str
    """Text of the mark beside the files."""
    shared: str
    """Text of the list of shared files, empty if there are none."""


class HistoryWorker:
    """Worker in its own process, at low priority and on few cores."""

    def __init__(
        self,
        directory: Path,
        config: DraftingConfig,
        share: int,
        num_shares: int,
        epoch_steps: int = 0,
        begun: str = "",
    ) -> None:
        """`epoch_steps`: see `SharedLibrary`.
        `begun`: name of a fresh start, which deletes the indexes of an earlier run."""
        self._num_threads = keep_to()
        num_sharing = min(num_shares, SHARING_WORKERS)
        own_bytes = {
            "max_index_bytes": room_for_indexes(directory, config) // num_shares,
            "shared_tokens": config.shared_tokens // num_sharing if share < num_sharing else 0,
        }
        self._directory, self._config = directory, config.model_copy(update=own_bytes)
        self._share, self._num_shares = share, num_shares
        self._mark = secrets.token_hex(16)
        if begun and _text(directory / f"run{MARK}") != begun:
            delete_indexes(directory)
            replace_file(directory / f"run{MARK}", begun.encode())
        self._libraries: dict[int, IndexLibrary] = {}
        """Library of the worker's own files, and of each worker whose files it does not see, by
        share."""
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
        """Return counts of all files on this node that this worker manages."""
        return sum((it.counts() for it in self._libraries.values()), LibraryCounts())

    def offer(self) -> Offer:
        """Write the mark and return it, with the list of shared files."""
        replace_file(self._mark_of(self._share), self._mark.encode())
        return Offer(self._mark, self._shared.listed)

    def sees(self, marks: Mapping[int, str]) -> set[int]:
        """Return those of these workers whose files are on this node. `marks`: mark of each."""
        return {share for share, mark in marks.items() if _text(self._mark_of(share)) == mark}

    def lacking(self, share: int, wanted: Mapping[str, int], listed: str) -> list[str]:
        """Return the names of another worker's files that this node lacks: the files of these
        prompts from the given steps on, and those in `listed`, the list of shared files."""
        missing = self._library_of(share).missing(wanted)
        prompts = [index_path(Path(), key) for key in missing]
        return [str(path) for path in (*prompts, *missing_shared(self._directory, listed))]

    def pack(self, names: Sequence[str]) -> tuple[int, dict[str, np.ndarray]]:
        """Read this worker's files of these names, from the first on, until one object is full.
        Return how many names were done, and the files. Files deleted meanwhile are left out."""
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
        """Store those of another worker's files that have these names."""
        for name in files.keys() & set(names):
            path = self._directory / name
            if path.parent == shared_dir(self._directory):
                replace_file(path, files[name].data)
            else:
                self._library_of(share).take(path.stem, files[name])
        return self.counts()

    def share_files(self, share: int, listed: str) -> LibraryCounts:
        """Make engines read another worker's shared files by its list. The files must be here."""
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


def keep_to(num_cpus: int | None = None) -> int:
    """Pin this thread, and the threads that it starts, to the last of its allowed cores at low
    priority. Return the number of cores: `num_cpus`, or a quarter of the allowed ones if None."""
    cores = sorted(os.sched_getaffinity(0))
    kept = cores[-(num_cpus or max(1, len(cores) // 4)) :]
    os.sched_setaffinity(0, kept)
    os.nice(_NICENESS)
    return len(kept)


def room_for_indexes(directory: Path, config: DraftingConfig) -> int:
    """Return the bytes that index files of a directory may take: at most half of its disk."""
    there = next(one for one in (directory, *directory.absolute().parents) if one.exists())
    return min(config.max_index_bytes, disk_usage(there).total // 2)


def share_of(prompt_key: str, num_shares: int) -> int:
    return int(prompt_key[:8], 16) % num_shares


def _text(path: Path) -> str:
    """Return the text of a file, empty if there is none."""
    with suppress(FileNotFoundError):
        return path.read_text()
    return ""


def histories(rows: pa.Table) -> list[PromptHistory]:
    """Return one history for each prompt. The rows of a prompt must be adjacent."""
    keys = rows["prompt_key"].to_pylist()
    starts = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
    responses = _lists(rows["response_token_ids"])
    turns = list(map(turn_sizes, rows["turns"].to_pylist()))
    rewards = rows["reward"].to_numpy()
    steps = rows["step"].to_numpy()
    return [
        PromptHistory(
            prompt_key=keys[start],
            step=int(steps[start]),
            prompt_token_ids=rows["prompt_token_ids"][start].values.to_numpy(),
            responses=responses[start:end],
            rewards=rewards[start:end].tolist(),
            turns=turns[start:end],
        )
        for start, end in pairwise([*starts, len(keys)])
    ]


def _lists(column: pa.ChunkedArray) -> list[np.ndarray]:
    array = column.combine_chunks()
    offsets = array.offsets.to_numpy()
    return np.split(array.flatten().to_numpy(), offsets[1:-1] - offsets[0])
