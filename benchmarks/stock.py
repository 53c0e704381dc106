"""vLLM as it comes, behind the same interface: what rollouts are compared with."""

from typing import Any

from engines.inference.engine.vllm_engine import VLLMEngine
from engines.inference.profiling.engine import ngram_config
from schemas.counts import DraftingCounts

NGRAM_WINDOW = 4
"""Draft tokens."""


class StockEngine(VLLMEngine):
    """vLLM's own sampling, no speculation, asynchronous scheduling."""

    async def _install(self) -> None:
        """Nothing."""

    async def take_drafting_counts(self) -> DraftingCounts:
        return DraftingCounts()

    def _speculation_args(self) -> dict[str, Any]:
        return {}


class StockNgramEngine(StockEngine):
    """vLLM as it is, with its n-gram drafter and its own rejection sampling."""

    def _speculation_args(self) -> dict[str, Any]:
        return {
            "speculative_config": ngram_config(NGRAM_WINDOW),
            "per_request_spec_decode_metrics": "summary",
        }
