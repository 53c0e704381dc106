"""vLLM's GPU worker for engines that draft. vLLM imports this module in the worker process."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from engines.inference.engine.graphs import decode_plainly


class DraftingWorker(Worker):
    """Worker that uses full CUDA graphs for steps without drafts."""

    def _make_model_runner(self) -> Any:
        runner = super()._make_model_runner()
        decode_plainly(runner)
        return runner
