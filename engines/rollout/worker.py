"""What refrain adds to a vLLM worker process, through `worker_extension_cls`."""

from typing import Any

from engines.rollout.sampling import ExactRejectionSampler, ExactSampler
from schemas.config import EngineConfig


class WorkerExtension:
    """Methods called with `collective_rpc`."""

    model_runner: Any

    def install_exact_sampling(self) -> None:
        """Replace the runner's samplers. Call once, before the first request."""
        runner = self.model_runner
        runner.sampler = ExactSampler(runner.sampler, runner)
        if hasattr(runner, "rejection_sampler"):
            runner.rejection_sampler = ExactRejectionSampler(runner.sampler)

    def install_drafting(self, config_json: str, engine: int) -> None:
        """Bind the proposer to its runner. Call once, before the first request."""
        config = EngineConfig.model_validate_json(config_json)
        self.model_runner.drafter.bind(self.model_runner, config, engine)

    def connect_drafters(self, addresses: dict[str, str]) -> None:
        """Reach the draft models there: name -> address."""
        self.model_runner.drafter.connect(addresses)

    def redraft(self, settings: dict[str, tuple[str, int, bool]]) -> None:
        """Draft so for these requests, by the names they were submitted with."""
        self.model_runner.drafter.redraft(settings)

    def draft_progress(self) -> dict[str, tuple[int, int]]:
        """(drafted, accepted) tokens of each request under its present setting."""
        return self.model_runner.drafter.progress()

    def take_drafting_counts(self) -> dict[str, float]:
        """The fields of `schemas.rollout.DraftingCounts` since the last call."""
        return self.model_runner.drafter.take_counts()
