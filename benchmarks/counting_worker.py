"""A vLLM worker that counts the bytes it copies."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from refrain.benchmarks.copies import CopiedBytes
from refrain.engines.inference.engine.worker import WorkerExtension


@contextmanager
def _counted_packing() -> Generator[list[int]]:
    """Yield the bytes of each weight that vLLM's CPU build repacks for its kernels while this
    lasts. The dispatcher does not see these copies."""
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
    """A worker that counts copies while it loads weights."""

    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def count_copies(self, path: str) -> tuple[int, int, int]:
        """Return the bytes copied out of the file, copied otherwise, and packed for a kernel."""
        with CopiedBytes(path) as copied, _counted_packing() as packed:
            self.start_weight_update()
            self.update_weights({"path": path})
            self.finish_weight_update()
        return copied.from_file, copied.others, sum(packed)
