"""SHA-256 of files, as `sha256sum` prints it: what was written is what is read."""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engines.reading import naming


def sha256_of(file: Path) -> str:
    """Raises ValueError that names a file which cannot be read."""
    with naming(file), file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def sha256_of_all(files: Iterable[Path]) -> dict[Path, str]:
    """Checksums by file. Threads share them out: hashing needs no lock of Python's."""
    files = list(files)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return dict(zip(files, threads.map(sha256_of, files), strict=True))
