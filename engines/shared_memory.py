"""Shared memory of a node, of which nothing stays behind, however its owner ended.

    memory_file     has no name in any directory: the kernel frees it with the last who has it open
    PrivateDir      /dev/shm/refrain-XXXXXXXX/, mode 0700, locked for as long as its owner lives
    name_after      names segments and semaphores of `multiprocessing` after such a directory
    clear_dead      deletes the directories that nobody has locked, and what is named after them

A lock ends with its process. A process number in the name would not tell: it may be another's by
then, and in another container, which can have the same shared memory, it means nothing.
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
"""Name of a directory, and in what is named after it."""


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


def name_after(directory: Path) -> None:
    """Let what this process makes by `multiprocessing` from here on go with a private directory:
    segments of shared memory, and semaphores, which a process that is killed leaves behind."""
    made: Any = segments
    made._SHM_NAME_PREFIX = f"/{directory.name}-"
    made._SHM_SAFE_NAME_LENGTH = len(made._SHM_NAME_PREFIX) + 16
    locks: Any = synchronize.SemLock
    # The rest of the name is anybody's: joblib changes how it is made.
    locks._rand = _names_after(directory)


def _names_after(directory: Path) -> Iterator[str]:
    while True:
        yield f"{directory.name}-{uuid4().hex[:16]}"


def clear_dead() -> None:
    """Delete the directories of this user's processes that are gone, and what is named after
    directories that are not there: a process may outlive the one that has its engine's."""
    owned = [(path, _OWNED.search(path.name)) for path in shared_memory().iterdir()]
    for path, owner in owned:
        # Another user's, no directory, or somebody else is deleting it, too.
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
    """A directory, and no link to one."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
