"""An index on disk: replaced in one move, mapped into memory without a copy.

    magic | header length | header (JSON) | text | order | weight | ... | sieve

Numbers are little-endian, arrays begin at multiples of 64 bytes. The page cache is the memory
manager, the disk is the swap, and a restart finds the files again. The header names sizes, settings
and the checksum of the arrays; its own checksum follows it. Nobody waits for the disk: what a
machine that went down left half written is refused by its checksum, and built again.
"""

import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa

from engines.histospec.index import HistoryIndex

_MAGIC = b"refrnHX2"
_PREFIX = struct.Struct("<8sII")
"""Magic, length of the header, checksum of the header."""
_ALIGNMENT = 64
SUFFIX = ".index"
COLD = ".zst"
"""End of the name of an index that is compressed, after `SUFFIX`."""
MARK = ".worker"
"""End of the name of the file that a history worker leaves beside its own."""
LIST = ".files.json"
"""End of the name of a list of shared files."""
_NUMBERS = ("step", "min_match", "max_match", "max_draft")
_ARRAYS = {
    "text": np.dtype("<i4"),
    "order": np.dtype("<i4"),
    "weight": np.dtype("<i8"),
    "first_tokens": np.dtype("<i4"),
    "first_starts": np.dtype("<i4"),
    "sieve": np.dtype("<i8"),
}


class DamagedIndex(ValueError):
    """The file is no index, or not the one that was written: build it again."""


def index_path(directory: Path, prompt_key: str) -> Path:
    return directory / f"{prompt_key}{SUFFIX}"


def cold_path(directory: Path, prompt_key: str) -> Path:
    """Place of an index while it is compressed."""
    return directory / f"{prompt_key}{SUFFIX}{COLD}"


def compress(path: Path, into: Path) -> None:
    """Replace an index by a compressed one: a third of its size, and no index for an engine."""
    with pa.BufferOutputStream() as sink:
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(path.read_bytes())
        replace_file(into, memoryview(sink.getvalue()))
    path.unlink()


def decompress(path: Path, into: Path) -> None:
    """Make a compressed index whole again. Raises `DamagedIndex`, and FileNotFoundError."""
    with pa.input_stream(str(path), compression="zstd") as stream:
        try:
            content = stream.read()
        except OSError as error:
            raise DamagedIndex(f"{path} is damaged: {error}") from error
    replace_file(into, content)
    path.unlink()


def shared_dir(directory: Path) -> Path:
    """Directory of the indexes that all prompts share, in that of the prompts' own."""
    return directory / "shared"


def write_index(index: HistoryIndex, prompt_key: str, path: Path) -> None:
    """Replace `path` by this index; a crash leaves the old file or the new one."""
    body = bytearray()
    sizes = {}
    for name, dtype in _ARRAYS.items():
        array = getattr(index, name)
        assert array.dtype == dtype
        sizes[name] = len(array)
        body += array.tobytes()
        body += bytes(-len(body) % _ALIGNMENT)
    numbers = {name: getattr(index, name) for name in _NUMBERS}
    about = {"prompt_key": prompt_key, "sizes": sizes, "checksum": zlib.crc32(body)}
    header = json.dumps(about | numbers).encode()
    header += b" " * (-(_PREFIX.size + len(header)) % _ALIGNMENT)
    replace_file(path, _PREFIX.pack(_MAGIC, len(header), zlib.crc32(header)), header, body)


def replace_file(path: Path, *parts: bytes | bytearray | memoryview) -> None:
    """Replace a file by these parts of one; a process that dies leaves the old file or the new."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("wb") as file:
        file.writelines(parts)
    temporary.replace(path)


def open_index(path: Path, prompt_key: str) -> HistoryIndex:
    """Map an index of this prompt. Raises `DamagedIndex`, and FileNotFoundError."""
    data = np.memmap(path, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    header, start = _read_header(data, path)
    if header["prompt_key"] != prompt_key:
        raise DamagedIndex(
            f"{path} is the index of prompt {header['prompt_key']}, not {prompt_key}"
        )
    arrays, end = {}, start
    for name, dtype in _ARRAYS.items():
        size = header["sizes"][name] * dtype.itemsize
        arrays[name] = data[end : end + size].view(dtype) if size <= len(data) - end else None
        end += size
        end += -(end - start) % _ALIGNMENT
    if end != len(data) or zlib.crc32(data[start:].data) != header["checksum"]:
        raise DamagedIndex(f"{path} is damaged: its arrays are not those that were written")
    return HistoryIndex(**arrays, **{name: header[name] for name in _NUMBERS})


def _read_header(data: np.ndarray, path: Path) -> tuple[dict, int]:
    if len(data) < _PREFIX.size:
        raise DamagedIndex(f"{path} is too short for an index: {len(data)} bytes")
    magic, length, checksum = _PREFIX.unpack(data[: _PREFIX.size].tobytes())
    if magic != _MAGIC:
        raise DamagedIndex(f"{path} is no history index of this version")
    header = data[_PREFIX.size : _PREFIX.size + length].tobytes()
    if len(header) != length or zlib.crc32(header) != checksum:
        raise DamagedIndex(f"{path} is damaged: its header is not the one that was written")
    return json.loads(header), _PREFIX.size + length
