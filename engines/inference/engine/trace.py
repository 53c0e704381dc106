"""Traces of an engine in one training step, by vLLM's profiler."""

from collections.abc import Iterable
from typing import Any

from refrain.schemas.rollout import RolloutRequest, Split
from refrain.schemas.trainer import TraceConfig

NUM_PASSES = 32
"""Forward passes in a trace. A whole rollout has thousands, which no viewer opens."""


def trace_args(config: TraceConfig | None) -> dict[str, Any]:
    """Return vLLM's arguments for `EngineTrace`."""
    if config is None:
        return {}
    profiler = {
        "profiler": "torch",
        "torch_profiler_dir": str(config.directory),
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
        "max_iterations": NUM_PASSES,
    }
    return {"profiler_config": profiler}


class EngineTrace:
    """The trace of the first forward passes of one step's rollouts, a file for each worker."""

    def __init__(self, index: int, config: TraceConfig | None) -> None:
        self._index = index
        self._step = config.step if config else None
        self._is_open = False

    async def begin(self, llm: Any, requests: Iterable[RolloutRequest]) -> None:
        """Start the profiler with the first request of the step. It stops after `NUM_PASSES`.
        `llm`: vLLM's `AsyncLLM`, started with `trace_args`."""
        ids = (request.id for request in requests)
        if any(id.step == self._step and id.split == Split.TRAIN for id in ids):
            self._step, self._is_open = None, True
            await llm.start_profile(f"engine-{self._index}")

    async def end(self, llm: Any) -> None:
        """Write a trace of fewer passes."""
        if self._is_open:
            self._is_open = False
            await llm.stop_profile()
