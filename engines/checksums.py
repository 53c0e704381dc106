"""SHA-256 checksums of files, as `sha256sum` prints them, to detect changed or damaged files."""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from refrain.engines.user_files import naming


def sha256_of(file: Path) -> str:
    """Return the checksum of a file. Raise ValueError, with its name, if it cannot be read."""
    with naming(file), file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def sha256_of_all(files: Iterable[Path]) -> dict[Path, str]:
    """Return the checksum of each file. Uses threads, because hashing releases Python's GIL."""
    files = list(files)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return dict(zip(files, threads.map(sha256_of, files), strict=True))
