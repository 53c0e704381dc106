"""Keys and values of withdrawn requests, in files that other engines of the node read.

    refrain-<random>/                   in shared memory, so that nothing is copied twice
      <withdrawal>/
        rank-0.part-1.safetensors       what was saved before the withdrawal
        rank-0.safetensors              the rest, and of each request where all of it is
        rank-1.safetensors              one tensor a layer: [blocks, heads of the rank, ...]

A layer's cache is [blocks, heads, tokens of a block, 2 * head_dim], on a CPU and on a GPU. Blocks
are saved whole, the last one of a request too, which is filled in part. Nothing of a part counts
but what the last file of its rank names.
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

from engines.inference.kv.heads import Piece

FREE_SHARE = 0.1
"""Share of the shared memory that is left to others: Ray's objects are there, too."""

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
"""Data types by their names in the format."""
_ALIGNMENT = 64
_ROWS_AT_ONCE = 64
"""Blocks of a layer that are copied between two looks at whether to go on."""
_PAGE_BYTES = 4096

UNREADABLE = (OSError, SafetensorError, ValueError)
"""Errors of reading when a file is gone, damaged or not what was looked for."""


class Stopped(Exception):
    """Writing was told to stop before all was written."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Blocks of one request that follow each other in a file."""

    part: int
    """Number of the file that they are in; 0: the rank's last one."""
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
        """(part, rows there, which of the `num` blocks) behind the `skipped` first ones."""
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
    """Parts that a rank has saved so far, before the withdrawal."""
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
    """Save these blocks of every layer; the bytes written.

    Args:
        caches: by layer.
        blocks: of each request, in the order of its tokens.
        num_tokens: of each request, all of whose blocks are in this file or earlier ones.
        identity: what a reader must have in common.
        earlier: blocks of requests that are in parts, before these.
        goes_on: asked from time to time.

    Raises OSError when the memory does not suffice, `Stopped` when it is not to go on.
    """
    rows = torch.tensor([row for of_one in blocks.values() for row in of_one], dtype=torch.long)
    places, own = {}, extents_of(blocks)
    for name, extent in own.items():
        extents = [*(earlier or {}).get(name, ()), extent]
        places[name] = [num_tokens[name], [[e.part, e.first, e.num_blocks] for e in extents]]
    header, sections = _header(caches, len(rows), {**identity, "requests": json.dumps(places)})
    size = len(header) + sum(end - begin for begin, end in sections.values())
    _reserve(path, size)
    # Copied from the cache right into the shared pages.
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
    """Extent of each request's blocks in the file that they are written to."""
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
    """Header of a safetensors file, padded; and where each layer begins and ends behind it."""
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
    """A file of this size. To write to a mapped page that is not there would end the process."""
    usage = shutil.disk_usage(path.parent)
    if usage.free - size < FREE_SHARE * usage.total:
        raise OSError(
            errno.ENOSPC,
            f"{size} bytes of keys and values do not fit into shared memory, of which "
            f"{usage.free} bytes of {usage.total} are free; make it larger",
            str(path.parent),
        )
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


class KVFile:
    """One file, mapped. Raises one of `UNREADABLE` when it is not as it should be."""

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        self._path = path
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
        found = {key: metadata.get(key) for key in identity}
        if found != dict(identity):
            raise ValueError(f"{path} is of {found}, not of {dict(identity)}")
        self._requests: dict[str, Any] = json.loads(metadata["requests"])
        self._bytes = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        length = 8 + int.from_bytes(self._bytes[:8].numpy().tobytes(), "little")
        self._layers: dict[str, Any] = json.loads(self._bytes[8:length].numpy().tobytes())
        self._data = self._bytes[length:]

    def touch(self) -> None:
        """Have all its pages mapped, so that nobody waits for one later."""
        self._bytes[::_PAGE_BYTES].sum()

    def find(self, name: str) -> SavedBlocks:
        if name not in self._requests:
            raise ValueError(f"{self._path} has nothing of {name}")
        num_tokens, extents = self._requests[name]
        return SavedBlocks(num_tokens, tuple(Extent(*extent) for extent in extents))

    def read(self, layer: str, rows: slice, heads: slice, like: Tensor) -> Tensor:
        """[rows, heads, ...] of a layer, mapped, for a cache `like` this one."""
        if layer not in self._layers:
            raise ValueError(f"{self._path} has no {layer}")
        described = self._layers[layer]
        shape, dtype = described["shape"], described["dtype"]
        if shape[2:] != list(like.shape[2:]) or dtype != _DTYPES[like.dtype]:
            raise ValueError(
                f"{self._path} has {layer} as {dtype} {shape}, the cache is "
                f"{_DTYPES[like.dtype]} {list(like.shape)}"
            )
        if rows.stop > shape[0] or heads.stop > shape[1]:
            raise ValueError(f"{self._path} has {shape} of {layer}, not {rows}, {heads}")
        saved = self._data[slice(*described["data_offsets"])].view(like.dtype).view(shape)
        return saved[rows, heads]


class KVFiles:
    """Files that are open, of one reader."""

    def __init__(self) -> None:
        self._open: dict[tuple[Path, tuple[str, ...]], KVFile] = {}

    def open(self, path: Path, identity: Mapping[str, str]) -> KVFile:
        """Raises one of `UNREADABLE`."""
        key = path, tuple(identity.values())
        if key not in self._open:
            self._open[key] = KVFile(path, identity)
        return self._open[key]

    def close(self) -> None:
        """Let go of all of them, which were deleted meanwhile or not."""
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
        """Copy into blocks `to` of the caches, from a request's block number `skipped` on, what the
        rank of the piece has saved there. Raises one of `UNREADABLE`."""
        last = rank_file(directory, piece.saved_by)
        blocks = self.open(last, identity).find(name)
        if skipped + len(to) > blocks.num_blocks:
            raise ValueError(f"{last} has {blocks} of {name}, not {skipped + len(to)}")
        for part, rows, which in blocks.runs(skipped, len(to)):
            file = self.open(rank_file(directory, piece.saved_by, part), identity)
            for layer, cache in caches.items():
                saved = file.read(layer, rows, piece.there, cache)
                cache[to[which].to(cache.device), piece.here] = saved.to(cache.device)
