"""A directory tree as it is at one moment, to be compared with itself later."""

import hashlib
import os
import stat
from pathlib import Path

Entry = tuple[int, int, str]
"""Mode, time of the last change in nanoseconds, content."""


def tree(directory: Path) -> dict[str, Entry]:
    """Entries by path, the directory's own among them."""
    return {str(path): _entry(path) for path in (directory, *directory.rglob("*"))}


def _entry(path: Path) -> Entry:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        content = os.readlink(path)
    elif stat.S_ISREG(status.st_mode):
        content = hashlib.blake2b(path.read_bytes()).hexdigest()
    else:
        content = ""
    return status.st_mode, status.st_mtime_ns, content
