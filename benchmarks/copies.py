"""Bytes that tensor operations copy, counted where they are carried out."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engines.inference.engine.vllm_engine import VLLMEngine
from engines.inference.engine.worker import WorkerExtension

_COPYING = {"aten::copy_", "aten::_to_copy", "aten::clone", "aten::cat"}


class CopiedBytes(TorchDispatchMode):
    """Counts, while this lasts, what is copied on this thread: out of files whose path begins so,
    and otherwise."""

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self._path = path
        self._mapped: list[range] = []
        self.from_file = 0
        self.others = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        name = op._schema.name
        if name in _COPYING and not result.is_meta:
            source = args[1] if name == "aten::copy_" else args[0]
            self._count(source, result.nbytes)
        return result

    def _count(self, source: Any, num_bytes: int) -> None:
        if isinstance(source, torch.Tensor) and self._is_mapped(source):
            self.from_file += num_bytes
        else:
            self.others += num_bytes

    def _is_mapped(self, tensor: torch.Tensor) -> bool:
        if not self._path or tensor.is_meta or not tensor.nbytes:
            return False
        if not any(tensor.data_ptr() in part for part in self._mapped):
            self._mapped = _mapped(self._path)
        return any(tensor.data_ptr() in part for part in self._mapped)


def _mapped(path: str) -> list[range]:
    """Addresses at which this process has mapped such files."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    found = [line[0].split("-") for line in lines if len(line) > 5 and line[5].startswith(path)]
    return [range(int(first, 16), int(end, 16)) for first, end in found]


@contextmanager
def _counted_packing() -> Generator[list[int]]:
    """Bytes of each weight that vLLM's CPU build puts into its kernel's own order, while this
    lasts: the dispatcher is not told."""
    from vllm import _custom_ops

    ops: Any = _custom_ops
    pack, packed = ops.create_onednn_mm, []

    def counting(weight: torch.Tensor, *args: Any) -> Any:
        packed.append(weight.nbytes)
        return pack(weight, *args)

    ops.create_onednn_mm = counting
    try:
        yield packed
    finally:
        ops.create_onednn_mm = pack


class CountingWorker(WorkerExtension):
    """A worker that says what it copies when it takes weights."""

    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def count_copies(self, path: str) -> tuple[int, int, int]:
        """Bytes copied out of the file, otherwise, and packed for a kernel."""
        with CopiedBytes(path) as copied, _counted_packing() as packed:
            self.start_weight_update()
            self.update_weights({"path": path})
            self.finish_weight_update()
        return copied.from_file, copied.others, sum(packed)


class CountingEngine(VLLMEngine):
    """An engine of such workers."""

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        worker = f"{CountingWorker.__module__}.{CountingWorker.__qualname__}"
        return super()._engine_args(on_cpu) | {"worker_extension_cls": worker}

    async def count_copies(self, path: str) -> list[tuple[int, int, int]]:
        return await self._llm.collective_rpc("count_copies", args=(path,))
