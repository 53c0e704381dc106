"""Files that must last: whole or as they were, after a crash and on a full disk too."""

import errno
import os
import re
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""The disk, a quota, or the most that a file may have."""
_NO_SPACE = "|".join(
    [*map(os.strerror, _FULL), *(rf"os error {number}\b" for number in _FULL), "disk is full"]
)
"""The same in errors of DuckDB, of safetensors and of SQLite."""


def write_durably(file: Path, text: str, mode: int = 0o666) -> None:
    """Replace a file by this text: it is on the disk when this returns. `mode`: who may use it, as
    far as the umask lets them.

    Raises OSError, on a full disk first of all, which it names; then the file is as it was.
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
    """A path beside a file: what is written there takes its place on the disk when the block ends,
    unless by an error."""
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
    with suppress(OSError):  # Where nothing can be written nothing can be deleted.
        unfinished.unlink(missing_ok=True)


def set_aside(path: Path, word: str = "damaged") -> Path:
    """Rename what is not to be used and may still be wanted, as in NAME.damaged, or NAME.damaged-2
    where that is taken; returns where it is now."""
    names = (f"{path.name}.{word}{number}" for number in ("", *map("-{}".format, range(2, 1000))))
    aside = next(place for name in names if not os.path.lexists(place := path.with_name(name)))
    path.rename(aside)
    flush(path.parent)
    return aside


def flush_all(directory: Path) -> None:
    """Bring a directory with everything in it to the disk."""
    for path in (*directory.rglob("*"), directory):
        flush(path)


def flush(path: Path) -> None:
    """Bring a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_disk_full(error: BaseException) -> bool:
    """Whether there was no room for a file, by the error or by what led to it: torch and
    safetensors have errors of their own for it."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _FULL) or re.search(_NO_SPACE, str(cause))
        for cause in causes(error)
    )


def disk_full(directory: Path, what: str, num_bytes: int, room: int) -> OSError:
    """Error of a full disk that names it: `what` takes `num_bytes` and there is `room` for so
    many."""
    return OSError(
        errno.ENOSPC,
        f"No space left on device: {what} takes {num_bytes:,} bytes, and the disk of {directory}, "
        f"mounted at {mount_of(directory)}, has room for {room:,}: "
        f"{max(0, num_bytes - room):,} are missing",
    )


def require_space(directory: Path, what: str, num_bytes: int) -> None:
    """Raises `disk_full` when the directory's disk has less room than `what` takes."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise disk_full(directory, what, num_bytes, free)


def mount_of(path: Path) -> Path:
    """Directory at which the disk of a path is mounted; the path need not be there yet."""
    return next(place for place in (path, *path.absolute().parents) if os.path.ismount(place))


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, what caused that ..."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
