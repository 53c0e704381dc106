"""Check paths that users give, and explain errors of the operating system in plain words."""

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_FIXES = {
    errno.ENOENT: "give an existing path",
    errno.EACCES: "give this user the permission (chmod), or another path",
    errno.EPERM: "give this user the permission, or another path",
    errno.EISDIR: "give a file",
    errno.ENOTDIR: "a part of the path is a file, not a directory: give another path",
    errno.ELOOP: "the link points to itself: give the file",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EEXIST: "give another path",
    errno.ENXIO: "it is a socket or a device: give a regular file",
    errno.EROFS: "give a path on a writable disk",
    errno.ENOSPC: "make room on that disk, or give a path on another",
    errno.EDQUOT: "make room in your quota, or give a path on another disk",
    errno.EFBIG: "raise the limit on file size (ulimit -f), or give a path on another disk",
    errno.EIO: "the disk has errors: check the system log (dmesg), and use another disk",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENOMEM: "free some memory",
    errno.EADDRINUSE: "stop the process that uses it, or give another",
}
_GIVEN = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EEXIST, errno.ENXIO),
)
"""Errors that another path would avoid; all others are problems of the machine."""
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def explain(error: OSError, file: Path | str = "") -> str:
    """Return a sentence that says what failed, where, and how to fix it."""
    where, fix = str(file or error.filename or ""), _FIXES.get(error.errno or 0, "")
    if error.errno == errno.ENOENT and where:
        return f"{where} does not exist: {fix}"
    what = error.strerror or str(error)
    return ": ".join(part for part in (where, what, fix) if part)


def is_given(error: OSError) -> bool:
    """Return whether the error is bad input: another path would avoid it."""
    return error.errno in _GIVEN


@contextmanager
def named(file: Path | str) -> Generator[None]:
    """Add the file's name to an OSError in the block, if it has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


def check_regular(file: Path, name: str = "") -> None:
    """Raise ValueError if a path is missing or no regular file.

    Opening a pipe or a device, for example, may block forever. `name`: the path's name in messages.
    """
    name = name or str(file)
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise ValueError(explain(error, name)) from error
    except ValueError as error:
        raise ValueError(f"{name!r} is not a valid path: {error}. Give another") from error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise ValueError(f"{name} is not a regular file but {kind}: give a file")


def check_place(directory: Path, name: str = "") -> None:
    """Raise ValueError if this user cannot create a directory, or cannot write to an existing one.

    `name`: the directory's name in messages.
    """
    name = name or str(directory)
    for place in (directory, *directory.absolute().parents):
        try:
            mode = place.stat().st_mode
        except FileNotFoundError:
            if not place.is_symlink():
                continue
            raise ValueError(f"{name}: {place} is a broken link: give a directory") from None
        except OSError as error:
            raise ValueError(explain(error, name)) from error
        if not stat.S_ISDIR(mode):
            raise ValueError(f"{name}: {place} is not a directory: give one")
        if not os.access(place, os.W_OK | os.X_OK):
            raise ValueError(f"{name}: this user may not write to {place}: give another directory")
        return
