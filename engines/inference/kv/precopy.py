"""Save keys and values while their requests still generate (pre-copy, as in VM live migration).

    begin     between two steps: choose the full blocks that are not saved yet
    a thread  copies them into a part file (`files.py`) while the next steps run
    take      between two steps, engine paused: return the copies that are still valid

vLLM does not write to a full, computed block while a request owns it. But the request may end or be
preempted, and another request may get the block in the middle of the copy. So a copy is valid only
if its request has owned the blocks all the time. The caller reports each request that loses its
blocks to `drop`, in the same step. vLLM uses a request's name once. Requests that share a block all
own it, so it stays when one of them ends.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Event, Thread

import torch
from torch import Tensor

from refrain.engines.inference.kv.files import Extent, Stopped, extents_of, write_blocks

logger = logging.getLogger(__name__)

_SUFFIX = ".writing"


class PreCopies:
    """Early copies of one rank's blocks, since the last withdrawal."""

    def __init__(self) -> None:
        self._extents: dict[str, list[Extent]] = {}
        """Copies of each request, in block order from the request's first block."""
        self._rows: dict[str, list[int]] = {}
        """Cache rows of these copies."""
        self._num_parts = 0
        self._copy: _Copy | None = None

    def begin(
        self,
        path_of_part: Callable[[int], Path],
        caches: Mapping[str, Tensor],
        rows: Mapping[str, Sequence[int]],
        identity: Mapping[str, str],
    ) -> Path | None:
        """Start to copy the cache rows that were not copied yet.

        `rows`: cache rows of each request, from its first one on.

        Return the path of the file, which appears when the copy ends (empty if the copy failed).
        Return None if there is nothing to copy.
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
        """Forget requests that lost their blocks. Call in that step, before blocks are reused."""
        for name in names:
            self._extents.pop(name, None)
            self._rows.pop(name, None)
            if self._copy:
                self._copy.rows.pop(name, None)

    def take(self, rows: Mapping[str, Sequence[int]]) -> dict[str, list[Extent]]:
        """Return the valid copies of these requests. Stop a running copy, and forget all copies.

        `rows`: cache rows of each request now; a copy is valid if they begin with its rows.
        """
        self._settle()
        held = {name: self._extents[name] for name, own in rows.items() if self._held(name, own)}
        self._extents, self._rows = {}, {}
        return held

    def _held(self, name: str, rows: Sequence[int]) -> Sequence[int]:
        """Return the copied rows of a request. Forget them if the request has other rows now."""
        held = self._rows.get(name, [])
        if list(rows[: len(held)]) != held:
            self.drop([name])
            return ()
        return held

    def _settle(self) -> None:
        """Stop the running copy, and keep its blocks if it is complete."""
        copy, self._copy = self._copy, None
        if copy is None or not copy.end():
            return
        for name, extent in copy.extents.items():
            if name in copy.rows:
                self._extents.setdefault(name, []).append(extent)
                self._rows.setdefault(name, []).extend(copy.rows[name])


class _Copy:
    """A thread that writes one part file."""

    def __init__(
        self,
        path: Path,
        part: int,
        caches: Mapping[str, Tensor],
        rows: Mapping[str, Sequence[int]],
        identity: Mapping[str, str],
    ) -> None:
        self.rows = dict(rows)
        """Rows of each request, without requests that lost their blocks since."""
        self.extents = extents_of(rows, part)
        self._path, self._caches, self._identity = path, caches, identity
        self._to_copy = dict(rows)
        self._stop, self._is_whole = Event(), False
        self._stream = _side_stream(caches)
        self._thread = Thread(target=self._write, name="precopy", daemon=True)
        self._thread.start()

    def end(self) -> bool:
        """Stop the copy. Return whether it is complete."""
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
            logger.warning("could not save keys and values ahead: %s", error)
            with contextlib.suppress(OSError):
                writing.unlink(missing_ok=True)
                self._path.touch()


def _side_stream(caches: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[object]:
    """Return a CUDA stream for the copies: after all earlier steps, parallel to later ones."""
    device = next(iter(caches.values())).device
    if device.type == "cpu":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)
