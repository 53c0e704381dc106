"""vLLM's GPU workers for engines that draft or record experts. vLLM imports this module in the
worker process."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from refrain.engines.inference.engine.graphs import decode_plainly, decode_plainly_on_v2


class DraftingWorker(Worker):
    """Worker that uses full CUDA graphs for steps without drafts."""

    def _make_model_runner(self) -> Any:
        runner = super()._make_model_runner()
        (decode_plainly_on_v2 if self.use_v2_model_runner else decode_plainly)(runner)
        return runner


class RecordingWorker(Worker):
    """Worker that records experts in CUDA graphs too."""

    def load_model(self, **kwargs: Any) -> None:
        from refrain.engines.inference.engine.expert_recorder import StepExperts

        super().load_model(**kwargs)
        self.step_experts = StepExperts(self.model_runner)


class RecordingDraftingWorker(RecordingWorker, DraftingWorker):
    """Worker that does both."""
