"""Indexes that one engine's requests draft from, by place of the request. Pure but for files.

    submitted ─expect─► opened by a thread ─► begins: a slot of the table ─► its last request ends

No step waits for a file: a request uses its index from the moment that the index is open.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from refrain.engines.histospec.index import HistoryIndex
from refrain.engines.histospec.index_loader import IndexLoader
from refrain.engines.histospec.matching import NO_INDEX, IndexTable


class RequestIndexes:
    """Slots of the table: one for each prompt that has requests and an index, and one for each
    shared index."""

    def __init__(
        self,
        directory: Path,
        max_num_requests: int,
        *,
        shares: bool,
        table: IndexTable | None = None,
        load: Callable[[HistoryIndex], Any] | None = None,
    ) -> None:
        """`load` turns an open index into what `table` takes, in a thread."""
        self.table = table or IndexTable()
        self.slots = np.full(max_num_requests, NO_INDEX, np.int32)
        """int32 [places]: slot of each request's own index."""
        self.shared_slots = np.zeros(0, np.int32)
        self.num_damaged = self.num_with_index = self.num_without_index = 0
        self._loader = IndexLoader(directory, shares=shares, load=load)
        self._slot_of: dict[str, int] = {}
        """Slot of each prompt's index, which all its requests use."""
        self._num_users: Counter[str] = Counter()
        self._waiting: dict[int, str] = {}
        """Prompt by place, for requests whose index is being opened."""
        self._shared: dict[str, int] = {}
        """Slot of each shared index, by name."""

    def expect(self, keys: Iterable[str]) -> None:
        """Start to open the indexes of these prompts, whose requests are about to begin."""
        self._loader.expect(key for key in keys if key not in self._slot_of)

    def settle(self) -> None:
        """Wait until all indexes are open that are being opened."""
        self._loader.settle()
        self.follow()

    def begin(self, place: int, key: str) -> None:
        self._num_users[key] += 1
        self._loader.look_for_shared()
        if not self._take(place, key):
            self._waiting[place] = key

    def end(self, place: int, key: str) -> None:
        self._waiting.pop(place, None)
        self.slots[place] = NO_INDEX
        self._num_users[key] -= 1
        if not self._num_users[key]:
            del self._num_users[key]
            if (slot := self._slot_of.pop(key, NO_INDEX)) != NO_INDEX:
                self.table.remove(slot)

    def follow(self) -> None:
        """Use the indexes that were opened since the last call."""
        for place, key in list(self._waiting.items()):
            if self._take(place, key):
                del self._waiting[place]
        if shared := self._loader.take_shared():
            self.num_damaged += shared.num_damaged
            for name in self._shared.keys() - shared.indexes.keys():
                self.table.remove(self._shared.pop(name))
            for name in shared.indexes.keys() - self._shared.keys():
                self._shared[name] = self.table.add(shared.indexes[name])
            self.shared_slots = np.array(sorted(self._shared.values()), np.int32)

    def _take(self, place: int, key: str) -> bool:
        """Give a request its index; return False if the index is still being opened."""
        if key not in self._slot_of:
            opened = self._loader.take(key)
            if opened is None:
                return False
            self.num_damaged += opened.is_damaged
            self._slot_of[key] = self.table.add(opened.index) if opened.index else NO_INDEX
        self.slots[place] = slot = self._slot_of[key]
        # A canary has no key, and is not expected to have a history.
        self.num_with_index += slot != NO_INDEX
        self.num_without_index += slot == NO_INDEX and key != ""
        return True
