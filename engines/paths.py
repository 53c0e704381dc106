"""Paths that people give, and what an operating system says of them: in plain words."""

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_MENDS = {
    errno.ENOENT: "give one that is there",
    errno.EACCES: "give this user the permission (chmod), or another path",
    errno.EPERM: "give this user the permission, or another path",
    errno.EISDIR: "give a file",
    errno.ENOTDIR: "a part of its path is a file where a directory belongs: give another path",
    errno.ELOOP: "the link leads to itself: give the file",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EEXIST: "give another path",
    errno.ENXIO: "it is a socket or a device: give a regular file",
    errno.EROFS: "give a path on a disk that can be written to",
    errno.ENOSPC: "make room on that disk, or give a path on another",
    errno.EDQUOT: "make room in your quota, or give a path on another disk",
    errno.EFBIG: "raise the largest size of a file (ulimit -f), or give a path on another disk",
    errno.EIO: "the disk fails: look at the system's log (dmesg), and copy the file to another",
    errno.EMFILE: "raise the number of open files (ulimit -n)",
    errno.ENOMEM: "free some memory",
    errno.EADDRINUSE: "stop what uses it, or give another",
}
_GIVEN = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EEXIST, errno.ENXIO),
)
"""Errors of a path that somebody gave, rather than of the machine."""
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def explain(error: OSError, file: Path | str = "") -> str:
    """Say in a sentence what an operating system refused, where, and how to fix it."""
    where, mend = str(file or error.filename or ""), _MENDS.get(error.errno or 0, "")
    if error.errno == errno.ENOENT and where:
        return f"{where} does not exist: {mend}"
    what = error.strerror or str(error)
    return ": ".join(part for part in (where, what, mend) if part)


def is_given(error: OSError) -> bool:
    """Whether another path would do, so that it is bad input."""
    return error.errno in _GIVEN


@contextmanager
def named(file: Path | str) -> Generator[None]:
    """Let an error of the operating system in the block say which file it is about."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


def check_regular(file: Path, name: str = "") -> None:
    """Raises ValueError that names a file which is missing, or a directory, a pipe, a socket or a
    device: to open one of these may wait for ever. `name`: for the message."""
    name = name or str(file)
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise ValueError(explain(error, name)) from error
    except ValueError as error:
        raise ValueError(f"{name!r} is no path: {error}; give another") from error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise ValueError(f"{name} is not a regular file but {kind}: give a file")


def check_place(directory: Path, name: str = "") -> None:
    """Raises ValueError for a directory that is not there and cannot be made, or that this user may
    not write to. `name`: for the message."""
    name = name or str(directory)
    for place in (directory, *directory.absolute().parents):
        try:
            mode = place.stat().st_mode
        except FileNotFoundError:
            if not place.is_symlink():
                continue
            raise ValueError(f"{name}: {place} is a link to nothing: give a directory") from None
        except OSError as error:
            raise ValueError(explain(error, name)) from error
        if not stat.S_ISDIR(mode):
            raise ValueError(f"{name}: {place} is not a directory: give one")
        if not os.access(place, os.W_OK | os.X_OK):
            raise ValueError(f"{name}: this user may not write to {place}: give another directory")
        return
