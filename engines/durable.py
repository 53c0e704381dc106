"""Files that must last: whole or as they were, after a crash and on a full disk too."""

import os
from pathlib import Path


def write_durably(file: Path, text: str) -> None:
    """Replace a file by this text: it is on the disk when this returns.

    Raises OSError, on a full disk first of all; then the file is as it was.
    """
    unfinished = file.with_name(f".unfinished_{file.name}")
    try:
        unfinished.write_text(text)
        flush(unfinished)
        unfinished.replace(file)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    flush(file.parent)


def flush(path: Path) -> None:
    """Bring a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
