"""CUDA's own part in a hand-over of weights, on CPUs: GPUs have names, memory of theirs is shared
memory of the host, and its handles are those by which torch's processes share that.

All above it is real: vLLM's trainer class and its engines, and what goes between them.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing import reductions


class TorchWithGpu:
    """torch, with a GPU to make tensors on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, device: str | None = None, **options: Any) -> Tensor:
        assert device == "cuda"
        made = torch.empty(*size, **options)
        made.untyped_storage()._share_filename_cpu_()
        return made


def handle_of(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """What `reduce_tensor` gives of a tensor on a GPU, with the GPU in the same place."""
    place = tensor.untyped_storage()._share_filename_cpu_()
    of = (torch.Tensor, tensor.size(), tensor.stride(), tensor.storage_offset(), None, tensor.dtype)
    return opened, (*of, "GPU of whoever sends", place)


def opened(*handle: Any) -> Tensor:
    """The same memory in another process; what `rebuild_cuda_tensor` is for a GPU's."""
    _, size, stride, offset, _, dtype, _, place = handle
    storage = UntypedStorage._new_shared_filename_cpu(*place)
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


def replacements(gpu: str) -> list[tuple[Any, str, Any]]:
    """What to set, for a process to work on the GPU of this name: on what, by which name."""
    from vllm.distributed.weight_transfer import packed_tensor

    def nothing(*_: Any) -> None:
        pass

    return [
        (torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=gpu)),
        (torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=nothing)),
        (torch.cuda, "synchronize", nothing),
        (torch.cuda, "ipc_collect", nothing),
        (torch.accelerator, "current_device_index", lambda: 0),
        (packed_tensor, "torch", TorchWithGpu()),
        (packed_tensor, "reduce_tensor", handle_of),
        (reductions, "rebuild_cuda_tensor", opened),
    ]


def stand_in(gpu: str) -> None:
    """Have this process work on the GPU of this name."""
    for owner, name, value in replacements(gpu):
        setattr(owner, name, value)


def stand_in_worker(worker: object, gpu: str) -> None:
    """The same in a worker of vLLM's."""
    del worker
    stand_in(gpu)
