"""vLLM as it comes, behind the same interface: what rollouts are compared with."""

from typing import Any

from benchmarks.stepwise import StepwiseEngine
from engines.inference.profiling.engine import ngram_config
from schemas.counts import DraftingCounts

NGRAM_WINDOW = 4
"""Draft tokens."""
_SPECULATION = {"speculative_config", "per_request_spec_decode_metrics"}


class StockEngine(StepwiseEngine):
    """vLLM's own sampling, no speculation, asynchronous scheduling."""

    async def _install(self) -> None:
        """Nothing."""

    async def take_drafting_counts(self) -> DraftingCounts:
        return DraftingCounts()

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        args = super()._engine_args(on_cpu)
        return {name: args[name] for name in args.keys() - _SPECULATION}


class StockNgramEngine(StockEngine):
    """vLLM as it is, with its n-gram drafter and its own rejection sampling."""

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        return super()._engine_args(on_cpu) | {
            "speculative_config": ngram_config(NGRAM_WINDOW),
            "per_request_spec_decode_metrics": "summary",
        }
