"""Shared memory of a node, of which nothing stays behind, however its owner ended.

    memory_file     has no name in any directory: the kernel frees it with the last who has it open
    PrivateDir      /dev/shm/refrain-XXXXXXXX/, mode 0700, locked for as long as its owner lives
    clear_dead      deletes the directories that nobody has locked

A lock ends with its process. A process number in the name would not tell: it may be another's by
then, and in another container, which can have the same shared memory, it means nothing.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "refrain-"


def shared_memory() -> Path:
    """Directory in the memory of this machine, where it has one; all users write to it."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


@contextmanager
def memory_file(name: str, content: bytes | memoryview) -> Generator[Path]:
    """A file with this content, while this lasts: processes of the same user, here and on no other
    machine, open it under the path. `name`: for people who look at open files.

    Raises OSError when the memory does not suffice.
    """
    with open(os.memfd_create(name), "wb") as file:
        file.write(content)
        file.flush()
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


class PrivateDir:
    """A directory in shared memory that this user alone may look into, until `delete` or until the
    process ends."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=shared_memory()))
            # Somebody who clears up may have found it before it was locked.
            with suppress(FileNotFoundError):
                self._lock = _open(self.path)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._lock)

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def clear_dead() -> None:
    """Delete the directories of this user's processes that are gone."""
    for path in shared_memory().glob(f"{_PREFIX}*"):
        # Another user's, no directory, or somebody else is deleting it, too.
        with suppress(PermissionError, NotADirectoryError, FileNotFoundError):
            _delete_if_dead(path)


def _delete_if_dead(path: Path) -> None:
    lock = _open(path)
    try:
        with suppress(BlockingIOError):
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def _open(path: Path) -> int:
    """A directory, and no link to one."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
