"""What refrain adds to a vLLM worker process, through `worker_extension_cls`."""

from typing import Any

from engines.rollout.sampling import ExactRejectionSampler, ExactSampler


class WorkerExtension:
    """Methods called with `collective_rpc`."""

    model_runner: Any

    def install_exact_sampling(self) -> None:
        """Replace the runner's samplers. Call once, before the first request."""
        runner = self.model_runner
        runner.sampler = ExactSampler(runner.sampler, runner)
        if hasattr(runner, "rejection_sampler"):
            runner.rejection_sampler = ExactRejectionSampler(runner.sampler)
