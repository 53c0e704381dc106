"""Index files opened ahead of the steps that draft from them.

A file is checked from its first byte to its last when it is opened, which brings it into memory as
well. A thread does so from when a request is submitted; one that nobody announced is opened when
it begins.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from engines.histospec.index import HistoryIndex
from engines.histospec.index_file import DamagedIndex, index_path, open_index
from engines.histospec.shared import SharedReader

MOST_AHEAD = 4096
"""Files that are held open for requests that have not begun, at most."""


class OpenedIndex(NamedTuple):
    """The index of a prompt, or why there is none."""

    index: HistoryIndex | None
    is_damaged: bool = False


class SharedIndexes(NamedTuple):
    """The indexes that all prompts share."""

    indexes: Mapping[str, HistoryIndex]
    num_damaged: int = 0


class IndexOpener:
    """Opener of one engine's index files."""

    def __init__(self, directory: Path, *, shares: bool) -> None:
        """`shares`: whether the shared indexes are read too."""
        self._directory = directory
        self._reader = SharedReader(directory) if shares else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="histories")
        self._ahead: dict[str, Future[OpenedIndex]] = {}
        self._shared: Future[SharedIndexes | None] | None = None

    def expect(self, keys: Iterable[str]) -> None:
        """Requests for these prompts are about to begin."""
        for key in keys:
            opening = self._ahead.get(key)
            # One that was opened for a request that never began may be of an earlier epoch.
            if key and (opening is None or opening.done()):
                self._ahead[key] = self._thread.submit(self._open, key)
        for key in list(self._ahead)[:-MOST_AHEAD]:
            self._ahead.pop(key).cancel()
        self.look_for_shared()

    def look_for_shared(self) -> None:
        """Open the shared indexes that are new."""
        if self._reader and self._shared is None:
            self._shared = self._thread.submit(self._read_shared)

    def settle(self) -> None:
        """Wait until all of it is open, as long as that takes."""
        wait([*self._ahead.values(), *([self._shared] if self._shared else [])])

    def take(self, key: str) -> OpenedIndex | None:
        """The index of a prompt; None: it is being opened, ask again."""
        opening = self._ahead.get(key)
        if opening is None:
            return self._open(key)
        if not opening.done():
            return None
        return self._ahead.pop(key).result()

    def take_shared(self) -> SharedIndexes | None:
        """The shared indexes, where there are others than the last time."""
        if self._shared is None or not self._shared.done():
            return None
        shared, self._shared = self._shared.result(), None
        return shared

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _open(self, key: str) -> OpenedIndex:
        try:
            return OpenedIndex(open_index(index_path(self._directory, key), key))
        except FileNotFoundError:
            return OpenedIndex(None)
        except DamagedIndex:
            # Drafts are optional; whoever owns the files finds and replaces it.
            return OpenedIndex(None, is_damaged=True)

    def _read_shared(self) -> SharedIndexes | None:
        assert self._reader
        return SharedIndexes(*self._reader.read()) if self._reader.changed() else None
