"""Two disks that fail: one is full, the other belongs to a machine that may lose power."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def full_disk(room: int = 10) -> Iterator[None]:
    """Let no file of this process grow beyond this many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Disk:
    """Notes flushed files, and files that get a public name before they are flushed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.named_too_early: list[str] = []
        self.unsettled: set[str] = set()
        """Directories with a new name that a crash would remove."""
        self._flushed: dict[int, tuple[int, int]] = {}
        fsync, rename, replace = os.fsync, os.rename, os.replace

        def noting_fsync(descriptor: int) -> None:
            fsync(descriptor)
            status = os.fstat(descriptor)
            self._flushed[status.st_ino] = (status.st_size, status.st_mtime_ns)
            self.unsettled.discard(os.readlink(f"/proc/self/fd/{descriptor}"))

        def noting_rename(source: str | Path, target: str | Path) -> None:
            self._look_at(Path(source), Path(target))
            rename(source, target)

        def noting_replace(source: str | Path, target: str | Path) -> None:
            self._look_at(Path(source), Path(target))
            replace(source, target)

        monkeypatch.setattr(os, "fsync", noting_fsync)
        monkeypatch.setattr(os, "rename", noting_rename)
        monkeypatch.setattr(os, "replace", noting_replace)

    def _look_at(self, source: Path, target: Path) -> None:
        # Only the writer looks for a name that starts with a dot.
        if target.name.startswith("."):
            return
        for path in (source, *source.rglob("*")):
            status = path.stat()
            if self._flushed.get(status.st_ino) != (status.st_size, status.st_mtime_ns):
                self.named_too_early.append(str(path))
        self.unsettled.add(str(target.parent))
