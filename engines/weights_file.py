"""Files of the last policy versions in the shared memory of a node, one file per version.

    <version>.safetensors    complete file; all engines of the node map it
    .unfinished-*            file that is being written

A new version reuses the memory of a version that is no longer needed. So a run allocates and maps
memory only for its first versions. A reader of an old version must call `check_file` afterwards: if
the file is gone, the reader may have read parts of two versions.
"""

import json
import mmap
import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from refrain.engines.shared_memory import PrivateDir, shared_memory

VERSION = "policy_version"
"""Key of the version in a file's own metadata."""
_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_LENGTH_BYTES = 8
_ALIGNMENT = 64
"""The first tensor begins at a multiple of this, in bytes."""
_ZEROS = bytes(4 * 2**20)


class NoRoom(RuntimeError):
    """Shared memory is too small for the weights. The message says how much is needed."""


class WrongFile(RuntimeError):
    """A file is incomplete or of another version."""


class LostFile(WrongFile):
    """A file no longer exists."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Layout of a safetensors file, known before the file is written."""

    header: bytes
    """Length and JSON at the start of the file."""
    offsets: Mapping[str, int]
    """Position of each tensor's first byte in the file."""
    num_bytes: int
    """Size of the file."""


def lay_out(
    shapes: Mapping[str, Sequence[int]], dtype: str, metadata: Mapping[str, str]
) -> FileLayout:
    """Return the layout of tensors stored one after the other.

    `dtype`: data type of all tensors, in safetensors' notation, for example "BF16".
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offsets, end = {}, 0
    for name, shape in shapes.items():
        first, end = end, end + prod(shape) * _ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [first, end]}
        offsets[name] = first
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    offsets = {name: len(header) + first for name, first in offsets.items()}
    return FileLayout(header, offsets, len(header) + end)


def check_file(path: Path, policy_version: int) -> None:
    """Raise `WrongFile` if a file is missing, incomplete, or marked with another version.

    A file without a version in its metadata passes.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            size = os.fstat(file.fileno()).st_size
            text = file.read(length) if length < size else b""
    except FileNotFoundError as error:
        raise LostFile(
            f"{path} is gone: policy version {policy_version} is no longer kept, or the process "
            "that wrote it has ended"
        ) from error
    try:
        entries = json.loads(text)
        version = entries.pop("__metadata__", {}).get(VERSION)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, AttributeError, TypeError, LookupError) as error:
        raise WrongFile(f"{path} ({size} bytes) has no valid safetensors header") from error
    if size != _LENGTH_BYTES + length + end:
        expected = _LENGTH_BYTES + length + end
        raise WrongFile(f"{path} has {size} bytes, but its header says {expected}")
    if version is not None and version != str(policy_version):
        raise WrongFile(f"{path} is of policy version {version}, not {policy_version}")


class VersionFiles:
    """The version files of one process. Their directory goes away with the process."""

    def __init__(self, num_kept: int) -> None:
        """`num_kept`: versions that readers may use at a time, including the newest."""
        assert num_kept > 0
        self.num_kept = num_kept
        self._dir: PrivateDir | None = None
        self._mapped: dict[int, mmap.mmap] = {}
        """Mapped file of each version."""

    def path(self, policy_version: int) -> Path:
        assert self._dir is not None, "no version was written"
        return self._dir.path / f"{policy_version}.safetensors"

    def has(self, policy_version: int) -> bool:
        return policy_version in self._mapped

    @contextmanager
    def writing(self, policy_version: int, num_bytes: int) -> Generator[mmap.mmap]:
        """Provide memory for a version's file during the block.

        The file gets its name when the block ends, and is deleted if the block fails. Delete the
        versions that are too old to keep first. Raise `NoRoom` before anything is written.
        """
        self._dir = self._dir or PrivateDir()
        unfinished = self._dir.path / f".unfinished-{policy_version}"
        try:
            memory = self._recycled(policy_version, num_bytes, unfinished)
            if memory is None:
                self._require_room(num_bytes)
                memory = _allocated(unfinished, num_bytes)
            # Clear the header's length, so that no reader takes the file for a complete one.
            memory[:_LENGTH_BYTES] = bytes(_LENGTH_BYTES)
            yield memory
            unfinished.rename(self.path(policy_version))
            self._mapped[policy_version] = memory
        finally:
            unfinished.unlink(missing_ok=True)

    def _recycled(self, policy_version: int, num_bytes: int, unfinished: Path) -> mmap.mmap | None:
        """Return the memory of an outdated version of this size, or None. Delete all other ones."""
        found = None
        for old in [v for v in self._mapped if v <= policy_version - self.num_kept]:
            memory, path = self._mapped.pop(old), self.path(old)
            # Check the size: if another process truncated the file, writing would kill this one.
            whole = path.exists() and path.stat().st_size == len(memory) == num_bytes
            if found is None and whole:
                path.rename(unfinished)
                found = memory
            else:
                path.unlink(missing_ok=True)
        return found

    def _require_room(self, num_bytes: int) -> None:
        room, where = shutil.disk_usage(shared_memory()), shared_memory()
        num_more = max(1, self.num_kept - len(self._mapped))
        needed = num_more * num_bytes
        if needed > room.free:
            raise NoRoom(
                f"the weights of a policy version take {_gb(num_bytes)}, and shared memory must "
                f"hold {num_more} more versions: {_gb(needed)}. But only {_gb(room.free)} of the "
                f"{_gb(room.total)} of {where} are free: give it more (docker run --shm-size, on "
                "Kubernetes an emptyDir of medium Memory at /dev/shm)"
            )

    def delete(self) -> None:
        """Delete all files. A process that has mapped one can still read it."""
        self._mapped.clear()
        if self._dir:
            self._dir.delete()
            self._dir = None


def _allocated(path: Path, num_bytes: int) -> mmap.mmap:
    """Return the memory of a new file, filled with zeros.

    Write zeros to allocate all pages now: a page that cannot be allocated later would kill the
    process. Allocating pages one by one, at the first access, also takes many times longer.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        left = num_bytes
        while left:
            left -= os.write(descriptor, _ZEROS[:left] if left < len(_ZEROS) else _ZEROS)
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
