"""Index files. A file is replaced in one move, and mapped into memory without a copy.

    magic | header length | header (JSON) | text | order | weight | ... | sieve

Numbers are little-endian; arrays begin at multiples of 64 bytes. The header holds sizes, settings
and the checksum of the arrays, and has its own checksum in the prefix. The page cache decides what
stays in memory, and a restart finds the files again. No write waits for the disk: if a crash of the
machine leaves a file incomplete, its checksum is wrong and the file is built again.
"""

import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa

from refrain.engines.histospec.index import HistoryIndex

_MAGIC = b"refrnHX2"
_PREFIX = struct.Struct("<8sII")
"""Magic, length of the header, checksum of the header."""
_ALIGNMENT = 64
SUFFIX = ".index"
COLD = ".zst"
"""Suffix of a compressed index, after `SUFFIX`."""
MARK = ".worker"
"""Suffix of the mark that a history worker writes beside its files."""
LIST = ".files.json"
"""Suffix of a list of shared files."""
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
    """The file is not an index, or not the one that was written. Build it again."""


def index_path(directory: Path, prompt_key: str) -> Path:
    return directory / f"{prompt_key}{SUFFIX}"


def cold_path(directory: Path, prompt_key: str) -> Path:
    """Return the path of a compressed index."""
    return directory / f"{prompt_key}{SUFFIX}{COLD}"


def compress(path: Path, into: Path) -> None:
    """Replace an index by a compressed one, a third of its size. Engines cannot open it."""
    with pa.BufferOutputStream() as sink:
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(path.read_bytes())
        replace_file(into, memoryview(sink.getvalue()))
    path.unlink()


def decompress(path: Path, into: Path) -> None:
    """Restore a compressed index. Raise `DamagedIndex` or FileNotFoundError."""
    with pa.input_stream(str(path), compression="zstd") as stream:
        try:
            content = stream.read()
        except OSError as error:
            raise DamagedIndex(f"{path} is damaged: {error}") from error
    replace_file(into, content)
    path.unlink()


def shared_dir(directory: Path) -> Path:
    """Return the directory of the shared indexes, inside the directory of the prompts' own."""
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
    """Replace a file by these parts, one after the other. If the process dies, the old file or the
    new one is left."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("wb") as file:
        file.writelines(parts)
    temporary.replace(path)


def open_index(path: Path, prompt_key: str) -> HistoryIndex:
    """Map the index of this prompt. Raise `DamagedIndex` or FileNotFoundError."""
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
        raise DamagedIndex(f"{path} is damaged: the checksum of its arrays or its size is wrong")
    return HistoryIndex(**arrays, **{name: header[name] for name in _NUMBERS})


def _read_header(data: np.ndarray, path: Path) -> tuple[dict, int]:
    if len(data) < _PREFIX.size:
        raise DamagedIndex(f"{path} is too short for an index: {len(data)} bytes")
    magic, length, checksum = _PREFIX.unpack(data[: _PREFIX.size].tobytes())
    if magic != _MAGIC:
        raise DamagedIndex(f"{path} is not a history index of this version")
    header = data[_PREFIX.size : _PREFIX.size + length].tobytes()
    if len(header) != length or zlib.crc32(header) != checksum:
        raise DamagedIndex(f"{path} is damaged: the checksum of its header is wrong")
    return json.loads(header), _PREFIX.size + length
