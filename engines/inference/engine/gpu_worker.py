"""vLLM's worker on a GPU, for engines that draft. Imported by vLLM in the worker's process."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from engines.inference.engine.graphs import decode_plainly


class DraftingWorker(Worker):
    """Worker whose full graphs are of plain decoding."""

    def _make_model_runner(self) -> Any:
        runner = super()._make_model_runner()
        decode_plainly(runner)
        return runner
