"""A disk that is full, and one of a machine that may lose its power at any time."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def full_disk(room: int = 10) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Disk:
    """Notes what is flushed, and what gets a name that somebody looks for before it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.named_too_early: list[str] = []
        self.unsettled: set[str] = set()
        """Directories with a new name in them that a crash would take away."""
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
        # A name with a dot is nobody's but the writer's.
        if target.name.startswith("."):
            return
        for path in (source, *source.rglob("*")):
            status = path.stat()
            if self._flushed.get(status.st_ino) != (status.st_size, status.st_mtime_ns):
                self.named_too_early.append(str(path))
        self.unsettled.add(str(target.parent))
