"""Write files durably: after a crash or on a full disk, a file is complete or unchanged."""

import errno
import os
import re
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a full disk, a used-up quota, and a file above the size limit."""
_NO_SPACE = "|".join(
    [*map(os.strerror, _FULL), *(rf"os error {number}\b" for number in _FULL), "disk is full"]
)
"""Pattern for the same errors in messages of DuckDB, safetensors and SQLite."""


def write_durably(file: Path, text: str, mode: int = 0o666) -> None:
    """Replace a file's content. When this returns, the text is on the disk.

    Raise OSError if writing fails; the file is unchanged then. On a full disk the error names the
    disk. `mode`: permissions of the file, before the umask.
    """
    unfinished = file.with_name(f".unfinished_{file.name}")
    try:
        unfinished.unlink(missing_ok=True)
        unfinished.touch(mode)
        unfinished.write_text(text)
        flush(unfinished)
        unfinished.replace(file)
    except OSError as error:
        written = unfinished.stat().st_size if unfinished.exists() else 0
        _discard(unfinished)
        if not is_disk_full(error):
            error.filename = str(file)
            raise
        raise disk_full(file.parent, file.name, len(text.encode()), written) from error
    flush(file.parent)


@contextmanager
def replacing(file: Path) -> Generator[Path]:
    """Provide a temporary path beside a file. Write the new content there.

    When the block ends without an error, the new content replaces the file on the disk.
    """
    unfinished = file.with_name(f".unfinished_{file.name}")
    try:
        unfinished.unlink(missing_ok=True)
        yield unfinished
        flush(unfinished)
        unfinished.replace(file)
    except BaseException as error:
        _discard(unfinished)
        if isinstance(error, OSError):
            error.filename = str(file)
        raise
    flush(file.parent)


def _discard(unfinished: Path) -> None:
    with suppress(OSError):  # A read-only disk allows no deletion either.
        unfinished.unlink(missing_ok=True)


def set_aside(path: Path, word: str = "damaged") -> Path:
    """Rename a file or directory that must not be used but may still be wanted. Return its path.

    The new name is NAME.damaged, or NAME.damaged-2 and so on if that is taken.
    """
    names = (f"{path.name}.{word}{number}" for number in ("", *map("-{}".format, range(2, 1000))))
    aside = next(place for name in names if not os.path.lexists(place := path.with_name(name)))
    path.rename(aside)
    flush(path.parent)
    return aside


def flush_all(directory: Path) -> None:
    """Flush a directory and everything in it to the disk."""
    for path in (*directory.rglob("*"), directory):
        flush(path)


def flush(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error or one of its causes means that the disk is full.

    torch and safetensors raise errors of their own for this.
    """
    return any(
        (isinstance(cause, OSError) and cause.errno in _FULL) or re.search(_NO_SPACE, str(cause))
        for cause in causes(error)
    )


def disk_full(directory: Path, what: str, num_bytes: int, room: int) -> OSError:
    """Return an error that names the full disk: `what` needs `num_bytes`, `room` bytes are free."""
    return OSError(
        errno.ENOSPC,
        f"No space left on device: {what} takes {num_bytes:,} bytes, and the disk of {directory}, "
        f"mounted at {mount_of(directory)}, has room for {room:,}: "
        f"{max(0, num_bytes - room):,} are missing",
    )


def require_space(directory: Path, what: str, num_bytes: int) -> None:
    """Raise the error of `disk_full` if the directory's disk has no room for `num_bytes`."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise disk_full(directory, what, num_bytes, free)


def mount_of(path: Path) -> Path:
    """Return the mount point of a path's disk. The path need not exist yet."""
    return next(place for place in (path, *path.absolute().parents) if os.path.ismount(place))


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause of the cause, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
