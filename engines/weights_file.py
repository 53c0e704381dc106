"""Files of the last policy versions in the shared memory of a node, each there once.

    <version>.safetensors    whole and of that version, for every engine of the node to map
    .unfinished-*            being written

The memory of a version that is no longer needed becomes that of a later one, so that a run's file
is allocated, and its pages are mapped, only the first times. Whoever may still read an old one
looks afterwards whether it is there (`check_file`): what it read may be of two versions.
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

from engines.shared_memory import PrivateDir, shared_memory

VERSION = "policy_version"
"""Key of the version in a file's own metadata."""
_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_LENGTH_BYTES = 8
_ALIGNMENT = 64
"""Bytes that the first tensor begins at a multiple of."""
_ZEROS = bytes(4 * 2**20)


class NoRoom(RuntimeError):
    """Shared memory is too small for the weights; the message tells what is needed."""


class WrongFile(RuntimeError):
    """A file is not the whole one of its version."""


class LostFile(WrongFile):
    """A file that is not there any more."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Places of tensors in a safetensors file, known before there is any."""

    header: bytes
    """Length and JSON, at the beginning of the file."""
    offsets: Mapping[str, int]
    """First byte of each tensor in the file."""
    num_bytes: int
    """Size of the file."""


def lay_out(
    shapes: Mapping[str, Sequence[int]], dtype: str, metadata: Mapping[str, str]
) -> FileLayout:
    """Layout of tensors that follow each other; `dtype`: of all, as safetensors calls it."""
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
    """Raises `WrongFile` for one that is not there, not whole, or says that it is of another
    version. One that says nothing may be of any."""
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
        raise WrongFile(f"{path}, of {size} bytes, does not begin as a safetensors file") from error
    if size != _LENGTH_BYTES + length + end:
        expected = _LENGTH_BYTES + length + end
        raise WrongFile(f"{path} has {size} bytes, and by what it says {expected}")
    if version is not None and version != str(policy_version):
        raise WrongFile(f"{path} is of policy version {version}, not {policy_version}")


class VersionFiles:
    """The files of one process, which has them in a directory that goes with it."""

    def __init__(self, num_kept: int) -> None:
        """`num_kept`: versions that may be read at a time, the newest one included."""
        assert num_kept > 0
        self.num_kept = num_kept
        self._dir: PrivateDir | None = None
        self._mapped: dict[int, mmap.mmap] = {}
        """Files by version."""

    def path(self, policy_version: int) -> Path:
        assert self._dir is not None, "no version was written"
        return self._dir.path / f"{policy_version}.safetensors"

    def has(self, policy_version: int) -> bool:
        return policy_version in self._mapped

    @contextmanager
    def writing(self, policy_version: int, num_bytes: int) -> Generator[mmap.mmap]:
        """Memory for the content of a file, which has its name when this ends, and is gone when it
        fails. Versions too old to be kept beside it go now.

        Raises `NoRoom` before anything is written.
        """
        self._dir = self._dir or PrivateDir()
        unfinished = self._dir.path / f".unfinished-{policy_version}"
        try:
            memory = self._recycled(policy_version, num_bytes, unfinished)
            if memory is None:
                self._require_room(num_bytes)
                memory = _allocated(unfinished, num_bytes)
            # Nobody takes it for a whole one.
            memory[:_LENGTH_BYTES] = bytes(_LENGTH_BYTES)
            yield memory
            unfinished.rename(self.path(policy_version))
            self._mapped[policy_version] = memory
        finally:
            unfinished.unlink(missing_ok=True)

    def _recycled(self, policy_version: int, num_bytes: int, unfinished: Path) -> mmap.mmap | None:
        """Memory of a version that is too old; None without one of this size. The others go."""
        found = None
        for old in [v for v in self._mapped if v <= policy_version - self.num_kept]:
            memory, path = self._mapped.pop(old), self.path(old)
            # Whatever somebody else has done to it: writing beyond its end would end the process.
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
                f"the weights of a policy version are {_gb(num_bytes)}, and {num_more} more are to "
                f"be kept in shared memory: {_gb(needed)}, where {_gb(room.free)} of the "
                f"{_gb(room.total)} of {where} are free; give it more (docker run --shm-size, on "
                "Kubernetes an emptyDir of medium Memory at /dev/shm)"
            )

    def delete(self) -> None:
        """Delete all of them; whoever has one mapped goes on reading it."""
        self._mapped.clear()
        if self._dir:
            self._dir.delete()
            self._dir = None


def _allocated(path: Path, num_bytes: int) -> mmap.mmap:
    """Memory of a new file. It is written once: a page that is missing later on would end the
    process, and where pages are made one by one as they are touched that takes many times longer.
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
