"""Stock vLLM behind the engine interface, to compare rollouts with."""

import os
from collections.abc import Sequence
from typing import Any

from refrain.benchmarks.stepwise import StepwiseEngine
from refrain.engines.inference.engine.admission import Admitted, admit
from refrain.engines.inference.profiling.engine import ngram_config
from refrain.schemas.counts import DraftingCounts

NGRAM_WINDOW = 4
"""Draft tokens."""
_OWN = {"speculative_config", "per_request_spec_decode_metrics", "kernel_config"}
"""Arguments that only refrain's engines get."""


class StockEngine(StepwiseEngine):
    """vLLM's own sampling without speculation, with asynchronous scheduling, on a GPU with its V2
    runner."""

    in_batches = False
    """Submit requests in batches as refrain does, and not with one call of `generate` each."""

    async def _install(self) -> None:
        """Do nothing."""

    async def take_drafting_counts(self) -> DraftingCounts:
        return DraftingCounts()

    async def _admit(self, llm: Any, requests: Sequence[Admitted]) -> None:
        await (admit(llm, requests) if self.in_batches else super()._admit(llm, requests))

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        if not on_cpu:
            # vLLM chooses its runner; `prepare_process` has set one for exact sampling.
            os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
        args = super()._engine_args(on_cpu)
        return {name: args[name] for name in args.keys() - _OWN}


class StockNgramEngine(StockEngine):
    """Stock vLLM with its n-gram drafter and its own rejection sampling."""

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        return super()._engine_args(on_cpu) | {
            "speculative_config": ngram_config(NGRAM_WINDOW),
            "per_request_spec_decode_metrics": "summary",
        }
