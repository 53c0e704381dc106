"""Count the bytes that tensor operations copy, in torch's dispatcher."""

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from refrain.engines.inference.engine.vllm_engine import VLLMEngine

_COPYING = {"aten::copy_", "aten::_to_copy", "aten::clone", "aten::cat"}
_WORKER = "refrain.benchmarks.counting_worker.CountingWorker"
"""A name and no import: vLLM must not be imported before its environment is set."""


class CopiedBytes(TorchDispatchMode):
    """Count the bytes copied on this thread: out of files whose path begins with `path`, and
    others."""

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
    """Return the addresses at which this process has mapped such files."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    found = [line[0].split("-") for line in lines if len(line) > 5 and line[5].startswith(path)]
    return [range(int(first, 16), int(end, 16)) for first, end in found]


class CountingEngine(VLLMEngine):
    """An engine whose workers count copies."""

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        return super()._engine_args(on_cpu) | {"worker_extension_cls": _WORKER}

    async def count_copies(self, path: str) -> list[tuple[int, int, int]]:
        return await self._llm.collective_rpc("count_copies", args=(path,))
