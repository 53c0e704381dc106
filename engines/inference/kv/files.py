"""Files with the keys and values of withdrawn requests. Other engines of the node read them.

    refrain-<random>/                   in shared memory, so nothing is copied twice
      <withdrawal>/
        rank-0.part-1.safetensors       blocks saved before the withdrawal
        rank-0.safetensors              the other blocks, and where all blocks of a request are
        rank-1.safetensors              one tensor per layer: [blocks, heads of the rank, ...]

A layer's cache is [blocks, heads, tokens of a block, 2 * head_dim], on a CPU and on a GPU. We save
whole blocks, even a request's last one, which is partly filled. The last file of a rank lists the
valid blocks; ignore all others in its parts.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from refrain.engines.inference.kv.heads import Piece

FREE_SHARE = 0.1
"""Share of shared memory to leave free for others, such as Ray's object store."""

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
"""Names of data types in the safetensors format."""
_ALIGNMENT = 64
_ROWS_AT_ONCE = 64
"""Blocks of a layer to copy between two checks whether to stop."""
_PAGE_BYTES = 4096

UNREADABLE = (OSError, SafetensorError, ValueError)
"""Errors of reading a file that is missing, damaged or not the expected one."""


class Stopped(Exception):
    """The caller stopped writing before all was written."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive blocks of one request in a file."""

    part: int
    """Number of the part file; 0 for the rank's last file."""
    first: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SavedBlocks:
    """All saved blocks of one request, in the order of its tokens."""

    num_tokens: int
    extents: tuple[Extent, ...]

    @property
    def num_blocks(self) -> int:
        return sum(extent.num_blocks for extent in self.extents)

    def runs(self, skipped: int, num: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield (part, rows in it, slice of the `num` blocks) for `num` blocks after `skipped`."""
        begin = 0
        for extent in self.extents:
            end = begin + extent.num_blocks
            low, high = max(begin, skipped), min(end, skipped + num)
            if low < high:
                first = extent.first + low - begin
                there = slice(first, first + high - low)
                yield extent.part, there, slice(low - skipped, high - skipped)
            begin = end


def rank_file(directory: str | Path, rank: int, part: int = 0) -> Path:
    return Path(directory) / f"rank-{rank}{f'.part-{part}' if part else ''}.safetensors"


def part_files(directory: Path, rank: int) -> list[Path]:
    """Return the parts that a rank has saved so far, before the withdrawal."""
    return sorted(directory.glob(f"rank-{rank}.part-*.safetensors"))


def write_blocks(
    path: Path,
    caches: Mapping[str, Tensor],
    blocks: Mapping[str, Sequence[int]],
    num_tokens: Mapping[str, int],
    identity: Mapping[str, str],
    earlier: Mapping[str, Sequence[Extent]] | None = None,
    goes_on: Callable[[], bool] = lambda: True,
) -> int:
    """Save blocks of every layer in a new file. Return the bytes written.

    Raise OSError if shared memory is full, and `Stopped` if `goes_on` returns False.

    Args:
        path: file to write; it must not exist.
        caches: cache of each layer, by name.
        blocks: cache rows of each request, in the order of its tokens.
        num_tokens: tokens of each request, in this file and `earlier` together.
        identity: properties that a reader must share.
        earlier: blocks of each request that come before and are in parts.
        goes_on: called now and then; return False to stop.
    """
    rows = torch.tensor([row for of_one in blocks.values() for row in of_one], dtype=torch.long)
    places, own = {}, extents_of(blocks)
    for name, extent in own.items():
        extents = [*(earlier or {}).get(name, ()), extent]
        places[name] = [num_tokens[name], [[e.part, e.first, e.num_blocks] for e in extents]]
    header, sections = _header(caches, len(rows), {**identity, "requests": json.dumps(places)})
    size = len(header) + sum(end - begin for begin, end in sections.values())
    _reserve(path, size)
    # Map the file, so that blocks are copied from the cache straight into shared memory.
    file = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    file[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for layer, cache in caches.items():
        begin, end = (len(header) + offset for offset in sections[layer])
        saved = file[begin:end].view(cache.dtype).view(len(rows), *cache.shape[1:])
        for some, to in zip(rows.split(_ROWS_AT_ONCE), saved.split(_ROWS_AT_ONCE), strict=False):
            if not goes_on():
                raise Stopped
            _gather(cache, some, to)
    return size


def extents_of(blocks: Mapping[str, Sequence[int]], part: int = 0) -> dict[str, Extent]:
    """Return the extent of each request's blocks in the file that will hold them."""
    extents, first = {}, 0
    for name, of_one in blocks.items():
        extents[name] = Extent(part, first, len(of_one))
        first += len(of_one)
    return extents


def _gather(cache: Tensor, rows: Tensor, to: Tensor) -> None:
    if cache.device.type == "cpu":
        torch.index_select(cache, 0, rows, out=to)
    else:
        to.copy_(cache[rows.to(cache.device)])


def _header(
    caches: Mapping[str, Tensor], num_rows: int, metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return a padded safetensors header, and (begin, end) of each layer after the header."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    sections, end = {}, 0
    for layer, cache in caches.items():
        shape = [num_rows, *cache.shape[1:]]
        begin, end = end, end + prod(shape) * cache.element_size()
        sections[layer] = (begin, end)
        described[layer] = {
            "dtype": _DTYPES[cache.dtype],
            "shape": shape,
            "data_offsets": sections[layer],
        }
    text = json.dumps(described).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, sections


def _reserve(path: Path, size: int) -> None:
    """Create a file of this size, with all its memory allocated.

    Writing to a mapped page without memory would kill the process. Raise OSError if the file would
    not leave `FREE_SHARE` of shared memory free.
    """
    usage = shutil.disk_usage(path.parent)
    if usage.free - size < FREE_SHARE * usage.total:
        raise OSError(
            errno.ENOSPC,
            f"{size} bytes of keys and values do not fit into shared memory "
            f"({usage.free} of {usage.total} bytes are free): give it more memory",
            str(path.parent),
        )
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


class KVFile:
    """A file, mapped into memory. Methods raise one of `UNREADABLE` if the file is wrong."""

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        self._path = path
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
        found = {key: metadata.get(key) for key in identity}
        if found != dict(identity):
            raise ValueError(f"{path} was saved with {found}, expected {dict(identity)}")
        self._requests: dict[str, Any] = json.loads(metadata["requests"])
        self._bytes = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        length = 8 + int.from_bytes(self._bytes[:8].numpy().tobytes(), "little")
        self._layers: dict[str, Any] = json.loads(self._bytes[8:length].numpy().tobytes())
        self._data = self._bytes[length:]

    def touch(self) -> None:
        """Map all pages now, so that no later read waits for them."""
        self._bytes[::_PAGE_BYTES].sum()

    def find(self, name: str) -> SavedBlocks:
        if name not in self._requests:
            raise ValueError(f"{self._path} does not contain request {name}")
        num_tokens, extents = self._requests[name]
        return SavedBlocks(num_tokens, tuple(Extent(*extent) for extent in extents))

    def read(self, layer: str, rows: slice, heads: slice, like: Tensor) -> Tensor:
        """Return rows and heads of a layer as a mapped tensor: [rows, heads, ...].

        `like`: the cache to copy to; the file must have its data type and trailing shape.
        """
        if layer not in self._layers:
            raise ValueError(f"{self._path} has no layer {layer}")
        described = self._layers[layer]
        shape, dtype = described["shape"], described["dtype"]
        if shape[2:] != list(like.shape[2:]) or dtype != _DTYPES[like.dtype]:
            raise ValueError(
                f"{self._path} has {layer} as {dtype} {shape}, but the cache is "
                f"{_DTYPES[like.dtype]} {list(like.shape)}"
            )
        if rows.stop > shape[0] or heads.stop > shape[1]:
            raise ValueError(f"{self._path} has {layer} as {shape}: no rows {rows}, heads {heads}")
        saved = self._data[slice(*described["data_offsets"])].view(like.dtype).view(shape)
        return saved[rows, heads]


class KVFiles:
    """The files that one reader has open."""

    def __init__(self) -> None:
        self._open: dict[tuple[Path, tuple[str, ...]], KVFile] = {}

    def open(self, path: Path, identity: Mapping[str, str]) -> KVFile:
        """Return the file, opened once. Raise one of `UNREADABLE` if it is wrong."""
        key = path, tuple(identity.values())
        if key not in self._open:
            self._open[key] = KVFile(path, identity)
        return self._open[key]

    def close(self) -> None:
        """Close all files. This frees the memory of files that were deleted meanwhile."""
        self._open.clear()

    def copy_heads(
        self,
        directory: Path,
        identity: Mapping[str, str],
        name: str,
        skipped: int,
        piece: Piece,
        caches: Mapping[str, Tensor],
        to: Tensor,
    ) -> None:
        """Copy blocks of a request, from number `skipped` on, into rows `to` of the caches.

        Copy the heads of `piece`, from the files of the rank that saved them. Raise one of
        `UNREADABLE` if a file is wrong.
        """
        last = rank_file(directory, piece.saved_by)
        blocks = self.open(last, identity).find(name)
        if skipped + len(to) > blocks.num_blocks:
            raise ValueError(f"{last} has {blocks} of {name}, expected {skipped + len(to)} blocks")
        for part, rows, which in blocks.runs(skipped, len(to)):
            file = self.open(rank_file(directory, piece.saved_by, part), identity)
            for layer, cache in caches.items():
                saved = file.read(layer, rows, piece.there, cache)
                cache[to[which].to(cache.device), piece.here] = saved.to(cache.device)
