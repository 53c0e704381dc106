"""vLLM as it comes, behind the same interface: what rollouts are compared with."""

import os
from collections.abc import Sequence
from typing import Any

from benchmarks.stepwise import StepwiseEngine
from engines.inference.engine.admission import Admitted, admit
from engines.inference.profiling.engine import ngram_config
from schemas.counts import DraftingCounts

NGRAM_WINDOW = 4
"""Draft tokens."""
_OWN = {"speculative_config", "per_request_spec_decode_metrics", "kernel_config"}
"""Arguments that refrain's engines alone are started with."""


class StockEngine(StepwiseEngine):
    """vLLM's own sampling, no speculation, asynchronous scheduling, on a GPU its newer runner."""

    in_batches = False
    """Hand requests over as refrain does, not by a call of `generate` for each."""

    async def _install(self) -> None:
        """Nothing."""

    async def take_drafting_counts(self) -> DraftingCounts:
        return DraftingCounts()

    async def _admit(self, requests: Sequence[Admitted]) -> None:
        await (admit(self._llm, requests) if self.in_batches else super()._admit(requests))

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        if not on_cpu:
            # Its own choice, which `prepare_process` has made for exact sampling.
            os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
        args = super()._engine_args(on_cpu)
        return {name: args[name] for name in args.keys() - _OWN}


class StockNgramEngine(StockEngine):
    """vLLM as it is, with its n-gram drafter and its own rejection sampling."""

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        return super()._engine_args(on_cpu) | {
            "speculative_config": ngram_config(NGRAM_WINDOW),
            "per_request_spec_decode_metrics": "summary",
        }
