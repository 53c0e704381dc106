"""Shared memory of a node that leaves nothing behind, however its owner ends.

    memory_file     file without a name; the kernel frees it when the last process closes it
    PrivateDir      /dev/shm/refrain-XXXXXXXX/, mode 0700, locked as long as its owner lives
    name_after      name segments and semaphores of `multiprocessing` after such a directory
    clear_dead      delete directories without a lock, and everything named after them

A lock ends with its process. A process id in the name would not do: the system reuses ids, and
other containers may share this memory but have other ids.
"""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import shared_memory as segments
from multiprocessing import synchronize
from pathlib import Path
from typing import Any
from uuid import uuid4

_PREFIX = "refrain-"
_OWNED = re.compile(rf"({_PREFIX}\w{{8}})(-|$)")
"""Name of a private directory. Names of segments and semaphores contain it too."""


def shared_memory() -> Path:
    """Return the machine's shared memory, which all users can write to.

    Without /dev/shm, return the directory for temporary files.
    """
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


@contextmanager
def memory_file(name: str, content: bytes | memoryview) -> Generator[Path]:
    """Provide a file in memory with this content during the block.

    Processes of the same user on this machine can open its path. `name`: shown in lists of open
    files. Raise OSError if there is not enough memory.
    """
    with open(os.memfd_create(name), "wb") as file:
        file.write(content)
        file.flush()
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


class PrivateDir:
    """A private directory in shared memory. It exists until `delete` or the end of the process."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=shared_memory()))
            # `clear_dead` of another process may delete the directory before we lock it.
            with suppress(FileNotFoundError):
                self._lock = _open(self.path)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._lock)

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def name_after(directory: Path) -> None:
    """Name all later `multiprocessing` segments and semaphores after a private directory.

    A killed process leaves them behind. `clear_dead` then deletes them with the directory.
    """
    made: Any = segments
    made._SHM_NAME_PREFIX = f"/{directory.name}-"
    made._SHM_SAFE_NAME_LENGTH = len(made._SHM_NAME_PREFIX) + 16
    locks: Any = synchronize.SemLock
    # Replace only the random part of the name: joblib changes how the rest is made.
    locks._rand = _names_after(directory)


def _names_after(directory: Path) -> Iterator[str]:
    while True:
        yield f"{directory.name}-{uuid4().hex[:16]}"


def clear_dead() -> None:
    """Delete directories of this user's dead processes, and what is named after missing ones.

    A process may outlive the owner of its engine's directory, and leave segments behind later.
    """
    owned = [(path, _OWNED.search(path.name)) for path in shared_memory().iterdir()]
    for path, owner in owned:
        # It may belong to another user, be no directory, or be deleted by another process now.
        with suppress(PermissionError, NotADirectoryError, FileNotFoundError):
            if owner and owner[1] == path.name:
                _delete_if_dead(path)
    for path, owner in owned:
        with suppress(PermissionError, IsADirectoryError, FileNotFoundError):
            if owner and not path.with_name(owner[1]).exists():
                path.unlink()


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
    """Open a directory. Refuse symbolic links."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
