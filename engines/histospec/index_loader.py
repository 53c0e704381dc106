"""Open index files before the steps that draft from them.

Opening a file verifies its checksum over all bytes, which also reads the file into memory. A thread
does this from the moment a request is submitted. A file that was not announced is opened when its
request begins.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from refrain.engines.histospec.index import HistoryIndex
from refrain.engines.histospec.index_file import DamagedIndex, index_path, open_index
from refrain.engines.histospec.shared import SharedReader

MOST_AHEAD = 4096
"""Most files kept open for requests that have not begun."""


class OpenedIndex(NamedTuple):
    """Index of a prompt, or the reason why there is none."""

    index: HistoryIndex | None
    is_damaged: bool = False


class SharedIndexes(NamedTuple):
    """Indexes that all prompts share."""

    indexes: Mapping[str, HistoryIndex]
    num_damaged: int = 0


class IndexLoader:
    """Opens the index files of one engine."""

    def __init__(
        self,
        directory: Path,
        *,
        shares: bool,
        load: Callable[[HistoryIndex], Any] | None = None,
    ) -> None:
        """`shares`: whether to read the shared indexes too. `load`: what to make of each index, in
        the thread; None if it cannot be used."""
        self._directory = directory
        self._load = load or (lambda index: index)
        self._reader = SharedReader(directory) if shares else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="histories")
        self._ahead: dict[str, Future[OpenedIndex]] = {}
        self._shared: Future[SharedIndexes | None] | None = None
        self._loaded: dict[str, Any] = {}
        """Shared indexes, as `load` made them."""

    def expect(self, keys: Iterable[str]) -> None:
        """Start to open the indexes of these prompts, whose requests are about to begin."""
        for key in keys:
            opening = self._ahead.get(key)
            # An index opened for a request that never began may be of an earlier epoch, so open it
            # again.
            if key and (opening is None or opening.done()):
                self._ahead[key] = self._thread.submit(self._open, key)
        for key in list(self._ahead)[:-MOST_AHEAD]:
            self._ahead.pop(key).cancel()
        self.look_for_shared()

    def look_for_shared(self) -> None:
        """Start to open new shared indexes."""
        if self._reader and self._shared is None:
            self._shared = self._thread.submit(self._read_shared)

    def settle(self) -> None:
        """Wait without a limit until all files are open."""
        wait([*self._ahead.values(), *([self._shared] if self._shared else [])])

    def take(self, key: str) -> OpenedIndex | None:
        """Return the index of a prompt, or None while it is being opened: call again later."""
        opening = self._ahead.get(key)
        if opening is None:
            return self._open(key)
        if not opening.done():
            return None
        return self._ahead.pop(key).result()

    def take_shared(self) -> SharedIndexes | None:
        """Return the shared indexes if they have changed since the last call."""
        if self._shared is None or not self._shared.done():
            return None
        shared, self._shared = self._shared.result(), None
        return shared

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _open(self, key: str) -> OpenedIndex:
        try:
            return OpenedIndex(self._load(open_index(index_path(self._directory, key), key)))
        except FileNotFoundError:
            return OpenedIndex(None)
        except DamagedIndex:
            # Drafts are optional, and the history worker that owns the file will find and replace
            # it.
            return OpenedIndex(None, is_damaged=True)

    def _read_shared(self) -> SharedIndexes | None:
        assert self._reader
        if not self._reader.changed():
            return None
        indexes, num_damaged = self._reader.read()
        known, self._loaded = self._loaded, {}
        for name, index in indexes.items():
            loaded = known.get(name) or self._load(index)
            if loaded is not None:
                self._loaded[name] = loaded
        return SharedIndexes(self._loaded, num_damaged)
