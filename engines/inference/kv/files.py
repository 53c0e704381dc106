"""Keys and values of withdrawn requests, in files that other engines of the node read.

    refrain-<random>/                   in shared memory, so that nothing is copied twice
      <withdrawal>/
        rank-0.safetensors              one tensor a layer: [blocks, heads of the rank, ...]
        rank-1.safetensors              metadata: of which model and weights, whose blocks are where

A layer's cache is [blocks, heads, tokens of a block, 2 * head_dim], on a CPU and on a GPU. Blocks
are saved whole, the last one of a request too, which is filled in part.
"""

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
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

UNREADABLE = (OSError, SafetensorError, ValueError)
"""Errors of reading when a file is gone, damaged or not what was looked for."""


@dataclass(frozen=True, slots=True)
class SavedBlocks:
    """Saved blocks of one request, in a file."""

    first: int
    num_blocks: int
    num_tokens: int


def rank_file(directory: str | Path, rank: int) -> Path:
    return Path(directory) / f"rank-{rank}.safetensors"


def write_blocks(
    path: Path,
    caches: Mapping[str, Tensor],
    blocks: Mapping[str, Sequence[int]],
    num_tokens: Mapping[str, int],
    identity: Mapping[str, str],
) -> int:
    """Save these blocks of every layer; the bytes written.

    Args:
        caches: by layer.
        blocks: of each request, in the order of its tokens.
        num_tokens: of each request.
        identity: what a reader must have in common.

    Raises OSError when the memory does not suffice.
    """
    rows = torch.tensor([row for of_one in blocks.values() for row in of_one])
    places, first = {}, 0
    for name, of_one in blocks.items():
        places[name] = (first, len(of_one), num_tokens[name])
        first += len(of_one)
    header, extents = _header(caches, len(rows), {**identity, "requests": json.dumps(places)})
    size = len(header) + sum(end - begin for begin, end in extents.values())
    _reserve(path, size)
    # Copied from the cache right into the shared pages.
    file = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    file[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for layer, cache in caches.items():
        begin, end = (len(header) + offset for offset in extents[layer])
        selected = cache[rows.to(cache.device)]
        file[begin:end].view(cache.dtype).view(selected.shape).copy_(selected)
    return size


def _header(
    caches: Mapping[str, Tensor], num_rows: int, metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Header of a safetensors file, padded; and where each layer begins and ends behind it."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    extents, end = {}, 0
    for layer, cache in caches.items():
        shape = [num_rows, *cache.shape[1:]]
        begin, end = end, end + prod(shape) * cache.element_size()
        extents[layer] = (begin, end)
        described[layer] = {
            "dtype": _DTYPES[cache.dtype],
            "shape": shape,
            "data_offsets": extents[layer],
        }
    text = json.dumps(described).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, extents


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
    """A file of one rank, mapped. Raises one of `UNREADABLE` when it is not as it should be."""

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        self._path = path
        self._file = safe_open(str(path), framework="pt")
        metadata = self._file.metadata() or {}
        found = {key: metadata.get(key) for key in identity}
        if found != dict(identity):
            raise ValueError(f"{path} is of {found}, not of {dict(identity)}")
        self._places: dict[str, list[int]] = json.loads(metadata["requests"])

    def find(self, name: str) -> SavedBlocks:
        if name not in self._places:
            raise ValueError(f"{self._path} has nothing of {name}")
        return SavedBlocks(*self._places[name])

    def copy_heads(
        self, name: str, skipped: int, piece: Piece, caches: Mapping[str, Tensor], to: Tensor
    ) -> None:
        """Copy into blocks `to` of the caches, from a request's block number `skipped` on."""
        blocks = self.find(name)
        rows = slice(blocks.first + skipped, blocks.first + skipped + len(to))
        if skipped + len(to) > blocks.num_blocks:
            raise ValueError(f"{self._path} has {blocks} of {name}, not {skipped + len(to)}")
        for layer, cache in caches.items():
            saved = self._read(layer, rows, piece.there, cache)
            cache[to.to(cache.device), piece.here] = saved.to(cache.device)

    def _read(self, layer: str, rows: slice, heads: slice, like: Tensor) -> Tensor:
        """[rows, heads, ...] of a layer, for a cache `like` this one."""
        saved = self._file.get_slice(layer)
        shape, dtype = saved.get_shape(), saved.get_dtype()
        if shape[2:] != list(like.shape[2:]) or dtype != _DTYPES[like.dtype]:
            raise ValueError(
                f"{self._path} has {layer} as {dtype} {shape}, the cache is "
                f"{_DTYPES[like.dtype]} {list(like.shape)}"
            )
        if rows.stop > shape[0] or heads.stop > shape[1]:
            raise ValueError(f"{self._path} has {shape} of {layer}, not {rows}, {heads}")
        return saved[rows, heads]
