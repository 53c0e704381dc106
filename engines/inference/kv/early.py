"""Keys and values that are saved while their requests go on: pre-copy, as of virtual machines that
move.

    begin     between two steps: which full blocks of which requests are not saved yet
    a thread  copies them into a part (`files.py`), beside the steps that follow
    take      between two steps, nobody generating: what of it still holds

A block that is full and computed is not written to while its request has it. What may happen is
that the request ends or is preempted, and the block becomes another's in the middle of the copy. So
a copy counts for a request that has had its blocks all the time: `drop` is told of every one that
lost them, in the step that takes them away, and vLLM's name of a request is used once. Who shares
a block has it as well, so that it stays when the others end.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Event, Thread

import torch
from torch import Tensor

from engines.inference.kv.files import Extent, Stopped, extents_of, write_blocks

logger = logging.getLogger(__name__)

_SUFFIX = ".writing"


class EarlyCopies:
    """Early copies of one rank's blocks, since the last withdrawal."""

    def __init__(self) -> None:
        self._extents: dict[str, list[Extent]] = {}
        """Copies by request; their blocks follow each other from its first one."""
        self._rows: dict[str, list[int]] = {}
        """Rows of the cache that these are copies of."""
        self._num_parts = 0
        self._copy: _Copy | None = None

    def begin(
        self,
        path_of_part: Callable[[int], Path],
        caches: Mapping[str, Tensor],
        rows: Mapping[str, Sequence[int]],
        identity: Mapping[str, str],
    ) -> Path | None:
        """Begin to copy what of these rows was not copied yet, by request from its first one on.

        Returns the file that there will be when this is over, an empty one if it came to nothing;
        None when there is nothing to copy.
        """
        self._settle()
        new = {name: own[len(self._held(name, own)) :] for name, own in rows.items()}
        new = {name: own for name, own in new.items() if own}
        if not new:
            return None
        self._num_parts += 1
        path = path_of_part(self._num_parts)
        self._copy = _Copy(path, self._num_parts, caches, new, identity)
        return path

    def drop(self, names: Iterable[str]) -> None:
        """Forget requests that have lost their blocks, in which order they lost and get them."""
        for name in names:
            self._extents.pop(name, None)
            self._rows.pop(name, None)
            if self._copy:
                self._copy.rows.pop(name, None)

    def take(self, rows: Mapping[str, Sequence[int]]) -> dict[str, list[Extent]]:
        """Copies that hold of these requests, each of which begins with these rows. Ends what is
        under way, and forgets all."""
        self._settle()
        held = {name: self._extents[name] for name, own in rows.items() if self._held(name, own)}
        self._extents, self._rows = {}, {}
        return held

    def _held(self, name: str, rows: Sequence[int]) -> Sequence[int]:
        """Rows of which there are copies. One that has others now begins anew."""
        held = self._rows.get(name, [])
        if list(rows[: len(held)]) != held:
            self.drop([name])
            return ()
        return held

    def _settle(self) -> None:
        """Take in what was under way, if it has ended well."""
        copy, self._copy = self._copy, None
        if copy is None or not copy.end():
            return
        for name, extent in copy.extents.items():
            if name in copy.rows:
                self._extents.setdefault(name, []).append(extent)
                self._rows.setdefault(name, []).extend(copy.rows[name])


class _Copy:
    """One part that is being written by a thread."""

    def __init__(
        self,
        path: Path,
        part: int,
        caches: Mapping[str, Tensor],
        rows: Mapping[str, Sequence[int]],
        identity: Mapping[str, str],
    ) -> None:
        self.rows = dict(rows)
        """Rows that it copies, without those of requests that lost theirs meanwhile."""
        self.extents = extents_of(rows, part)
        self._path, self._caches, self._identity = path, caches, identity
        self._to_copy = dict(rows)
        self._stop, self._is_whole = Event(), False
        self._stream = _side_stream(caches)
        self._thread = Thread(target=self._write, name="early copy", daemon=True)
        self._thread.start()

    def end(self) -> bool:
        """Whether it is whole; if not, no more of it is written."""
        self._stop.set()
        self._thread.join()
        return self._is_whole

    def _write(self) -> None:
        writing = self._path.with_name(self._path.name + _SUFFIX)
        try:
            with self._stream:
                write_blocks(
                    writing,
                    self._caches,
                    self._to_copy,
                    dict.fromkeys(self._to_copy, 0),
                    self._identity,
                    goes_on=lambda: not self._stop.is_set(),
                )
            writing.rename(self._path)
            self._is_whole = True
        except (OSError, Stopped) as error:
            logger.warning("keys and values are not saved ahead: %s", error)
            with contextlib.suppress(OSError):
                writing.unlink(missing_ok=True)
                self._path.touch()


def _side_stream(caches: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[object]:
    """Stream on which GPUs make the copies: behind the steps so far, beside those to come."""
    device = next(iter(caches.values())).device
    if device.type == "cpu":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)
