"""Weight transfer by CUDA IPC, on CPUs. Only CUDA's own part is replaced: GPUs are names, their
memory is shared memory of the host, and IPC handles are handles of that shared memory.

The rest is real: vLLM's trainer class, its engines, and the messages between them.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing import reductions


class TorchWithGpu:
    """torch with a GPU on which to create tensors."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, device: str | None = None, **options: Any) -> Tensor:
        assert device == "cuda"
        made = torch.empty(*size, **options)
        made.untyped_storage()._share_filename_cpu_()
        return made


def handle_of(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Return a handle as `reduce_tensor` makes it for a GPU: the GPU has the same place in it."""
    place = tensor.untyped_storage()._share_filename_cpu_()
    of = (torch.Tensor, tensor.size(), tensor.stride(), tensor.storage_offset(), None, tensor.dtype)
    return opened, (*of, "GPU of whoever sends", place)


def opened(*handle: Any) -> Tensor:
    """Return the same memory in another process, as `rebuild_cuda_tensor` does for a GPU's."""
    _, size, stride, offset, _, dtype, _, place = handle
    storage = UntypedStorage._new_shared_filename_cpu(*place)
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


def replacements(gpu: str) -> list[tuple[Any, str, Any]]:
    """Return the (object, name, value) to set so that a process works on the GPU of this name."""
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
    """Make this process work on the GPU of this name."""
    for owner, name, value in replacements(gpu):
        setattr(owner, name, value)


def stand_in_worker(worker: object, gpu: str) -> None:
    """Make a vLLM worker work on the GPU of this name."""
    del worker
    stand_in(gpu)
