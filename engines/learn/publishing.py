"""Publish a policy version: write each tensor to shared memory on this node, and send it to the
engines that receive weights from the trainer's GPUs.

    rank 0   gather, cast, write at its place in the file, send, free
    rank n   gather, send, free

Beside the model, only one tensor exists at a time, in the engines' data type. Sending needs a
buffer and two tensors.
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

from refrain.engines.learn.lora import adapted_layers, base_tensors, merged, whole
from refrain.engines.learn.rounding_loss import KeptUpdate
from refrain.engines.weights_file import VERSION, VersionFiles, lay_out

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Data types as safetensors calls them."""
_NOTHING = ("nothing", torch.empty(0))


@dataclass(frozen=True, slots=True)
class WholeTensors:
    """A policy's tensors, which can be iterated once. With FSDP2 every process must iterate over
    all."""

    shapes: Mapping[str, Sequence[int]]
    """Shape of each tensor, in the order of `tensors`."""
    tensors: Iterable[tuple[str, Tensor]]
    """Name and tensor, on any device."""
    dtype: torch.dtype
    """Data type in which the tensors are written."""
    kept_update: KeptUpdate | None = None
    """How much of the adapters' update rounding leaves, known after the last tensor; None without
    adapters."""


def whole_tensors(model: PreTrainedModel, dtype: torch.dtype) -> WholeTensors:
    """Return the whole parameters and persistent buffers as `dtype`, with adapters merged. They
    have Hugging Face's names. Tied weights appear once, under their first name, as in the model's
    files."""
    parts = base_tensors(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in parts.items()}
    adapted = adapted_layers(model)
    kept_update = KeptUpdate(dtype) if adapted else None
    return WholeTensors(shapes, _whole(parts, adapted, dtype, kept_update), dtype, kept_update)


def _whole(
    parts: Mapping[str, Tensor],
    adapted: Mapping[str, LoraLayer],
    dtype: torch.dtype,
    kept_update: KeptUpdate | None,
) -> Iterator[tuple[str, Tensor]]:
    for name, part in parts.items():
        # Bind the tensor to no name here: it would stay alive while the next one is gathered.
        if kept_update and name in adapted:
            yield name, _merged(part, adapted[name], kept_update)
        else:
            yield name, _gathered(part, dtype)


def _merged(part: Tensor, layer: LoraLayer, kept_update: KeptUpdate) -> Tensor:
    before = whole(part)
    after = merged(before, layer)
    kept_update.add(before, after)
    return after


def _gathered(part: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(part, DTensor):
        return part
    # Cast before gathering, to transfer less.
    shards: Any = part.to(dtype)
    return shards.full_tensor()


class Receivers(Protocol):
    """Engines that receive a policy version from the trainer's GPUs."""

    def send(self, rank: int, policy_version: int, whole: WholeTensors) -> tuple[str, ...]:
        """Send all tensors; called on every rank. Return which engines did not take them, and
        why."""
        ...


def publish(tensors: WholeTensors, policy_version: int, files: VersionFiles) -> Path:
    """Write a policy version and return its file. Raise `NoRoom` if shared memory is full."""
    take(written(tensors, policy_version, files))
    return files.path(policy_version)


def take(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Consume all tensors and keep none."""
    deque(tensors, maxlen=0)


def written(
    tensors: WholeTensors, policy_version: int, files: VersionFiles
) -> Iterator[tuple[str, Tensor]]:
    """Write each tensor and yield it again. The file appears after the last one. Raise `NoRoom` if
    shared memory is full."""
    metadata = {"format": "pt", VERSION: str(policy_version)}
    layout = lay_out(tensors.shapes, _NAMES[tensors.dtype], metadata)
    with files.writing(policy_version, layout.num_bytes) as memory:
        stream = iter(tensors.tensors)
        for name, shape in tensors.shapes.items():
            told, tensor = next(stream, _NOTHING)
            assert (told, tuple(tensor.shape)) == (name, tuple(shape)), f"{told} for {name}"
            _write(tensor, memory, layout.offsets[name], tensors.dtype)
            yield told, tensor
            del tensor  # Free it before the next tensor is gathered.
        assert next(stream, None) is None, "more tensors than were announced"
        memory[: len(layout.header)] = layout.header


def _write(tensor: Tensor, memory: mmap, first: int, dtype: torch.dtype) -> None:
    """Cast a tensor directly into its place in the file, without a copy."""
    if num := tensor.numel():
        place = torch.frombuffer(memory, dtype=dtype, count=num, offset=first)
        place.view(tensor.shape).copy_(tensor)
