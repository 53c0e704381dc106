"""A policy version for the engines: tensor by tensor into the shared memory of this node, and to
those that take it from the trainer's GPUs.

    rank 0   gathered, cast, written where the file has it, handed on, freed
    rank n   gathered, handed on, freed

Beside the model one tensor is there at a time, in the engines' data type; where it is handed on,
a buffer and two.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any, Protocol

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from engines.learn.arrival import Arrival
from engines.learn.lora import adapted_layers, base_tensors, merged, whole
from engines.weights_file import VERSION, VersionFiles, lay_out

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Data types as safetensors calls them."""
_NOTHING = ("nothing", torch.empty(0))


@dataclass(frozen=True, slots=True)
class WholeTensors:
    """Tensors of a policy, to be taken once, one after the other. Under FSDP2 every process takes
    all of them."""

    shapes: Mapping[str, Sequence[int]]
    """Shape of each, in the order in which they come."""
    tensors: Iterable[tuple[str, Tensor]]
    """Name and tensor, wherever it is."""
    dtype: torch.dtype
    """Data type that they are to be written in."""
    arrival: Arrival | None = None
    """Share of the adapters' update that is in them, once all are taken; None without adapters."""


def whole_tensors(model: PreTrainedModel, dtype: torch.dtype) -> WholeTensors:
    """Whole parameters and persistent buffers as `dtype`, adapters merged. Names are Hugging
    Face's; tied weights come once, under their first name, as in its files."""
    parts = base_tensors(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in parts.items()}
    adapted = adapted_layers(model)
    arrival = Arrival(dtype) if adapted else None
    return WholeTensors(shapes, _whole(parts, adapted, dtype, arrival), dtype, arrival)


def _whole(
    parts: Mapping[str, Tensor],
    adapted: Mapping[str, LoraLayer],
    dtype: torch.dtype,
    arrival: Arrival | None,
) -> Iterator[tuple[str, Tensor]]:
    for name, part in parts.items():
        # Without a name here: it would be held while the next one is gathered.
        if arrival and name in adapted:
            yield name, _merged(part, adapted[name], arrival)
        else:
            yield name, _gathered(part, dtype)


def _merged(part: Tensor, layer: LoraLayer, arrival: Arrival) -> Tensor:
    before = whole(part)
    after = merged(before, layer)
    arrival.add(before, after)
    return after


def _gathered(part: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(part, DTensor):
        return part
    # Cast first: less is gathered.
    shards: Any = part.to(dtype)
    return shards.full_tensor()


class Receivers(Protocol):
    """Engines that take a policy version from the trainer's GPUs."""

    def send(self, rank: int, policy_version: int, whole: WholeTensors) -> tuple[str, ...]:
        """Take all tensors, on every rank, and hand them on; who did not take them, and why."""
        ...


def publish(tensors: WholeTensors, policy_version: int, files: VersionFiles) -> Path:
    """Write a policy version, and return its file. Raises `NoRoom`."""
    take(written(tensors, policy_version, files))
    return files.path(policy_version)


def take(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Have every tensor made, and keep none."""
    deque(tensors, maxlen=0)


def written(
    tensors: WholeTensors, policy_version: int, files: VersionFiles
) -> Iterator[tuple[str, Tensor]]:
    """The tensors again, each when it is written; their file is there after the last. Raises
    `NoRoom`."""
    metadata = {"format": "pt", VERSION: str(policy_version)}
    layout = lay_out(tensors.shapes, _NAMES[tensors.dtype], metadata)
    with files.writing(policy_version, layout.num_bytes) as memory:
        stream = iter(tensors.tensors)
        for name, shape in tensors.shapes.items():
            told, tensor = next(stream, _NOTHING)
            assert (told, tuple(tensor.shape)) == (name, tuple(shape)), f"{told} for {name}"
            _write(tensor, memory, layout.offsets[name], tensors.dtype)
            yield told, tensor
            del tensor  # Before the next one is gathered.
        assert next(stream, None) is None, "more tensors than were announced"
        memory[: len(layout.header)] = layout.header


def _write(tensor: Tensor, memory: mmap, first: int, dtype: torch.dtype) -> None:
    """Cast a tensor into its place in a file: nothing is made on the way."""
    if num := tensor.numel():
        place = torch.frombuffer(memory, dtype=dtype, count=num, offset=first)
        place.view(tensor.shape).copy_(tensor)
