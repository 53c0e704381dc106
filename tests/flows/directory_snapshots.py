"""Snapshots of a directory tree, to check later that nothing has changed."""

import hashlib
import os
import stat
from pathlib import Path

Entry = tuple[int, int, str]
"""Mode, time of the last change in nanoseconds, hash of the content or target of the link."""


def tree(directory: Path) -> dict[str, Entry]:
    """Return the entries of the directory and of all that is in it, by path."""
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
