"""Free the GPU memory of tensors, and keep their content in host memory until they come back.

The tensors stay the same objects, so the optimiser's states, FSDP2's shards and all views stay
valid. Only their storage is emptied and filled again.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor


class HostCopies:
    """Host copies of tensors. The host buffers are kept for the next time."""

    def __init__(self) -> None:
        self._away: list[tuple[UntypedStorage, Tensor]] = []
        self._buffers: dict[int, Tensor] = {}

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy these tensors to host memory and free their GPU memory. They must not be used until
        `restore`."""
        assert not self._away, "they have left"
        for storage in _storages(tensors):
            buffer = self._buffer(storage)
            buffer.copy_(_bytes_of(storage), non_blocking=True)
            self._away.append((storage, buffer))
        _wait()
        for storage, _ in self._away:
            storage.resize_(0)
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    @property
    def hold_something(self) -> bool:
        """Whether tensors have left and not come back."""
        return bool(self._away)

    def restore(self) -> None:
        """Fill the tensors with their content again. Does nothing if none have left."""
        for storage, buffer in self._away:
            storage.resize_(buffer.numel())
            _bytes_of(storage).copy_(buffer, non_blocking=True)
        _wait()
        self._away = []

    def _buffer(self, storage: UntypedStorage) -> Tensor:
        # Key by the C++ object, which lives as long as the tensor.
        key, num_bytes = storage._cdata, storage.nbytes()
        kept = self._buffers.get(key)
        if kept is None or kept.numel() != num_bytes:
            kept = self._buffers[key] = _locked(torch.empty(num_bytes, dtype=torch.uint8))
        return kept


def _storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Yield the storages of the tensors' local shards, each once. Skip storages that torch cannot
    free, for example a memory-mapped file on a CPU."""
    seen = set()
    for tensor in tensors:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = own.untyped_storage()
        if storage.resizable() and storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _locked(buffer: Tensor) -> Tensor:
    """Return the buffer, page-locked for fast copies if there is a GPU. torch's own allocator would
    round its size up to a power of two."""
    if torch.cuda.is_available():
        # If locking fails, copies are slower but still correct.
        torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
    return buffer


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
