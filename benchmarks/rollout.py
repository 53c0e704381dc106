"""Rollouts on real vLLM: stock against refrain's drafting, interleaved, on a recorded run's work.

For each epoch, every engine gets the weights that the run had there and generates the requests
that the run gave its first engine: stock vLLM without speculation and with n-gram drafts, both with
vLLM's own sampling; refrain with drafting off, and on with the run's own history up to that epoch.
Stock samples other tokens, so tokens per second are compared; the tokens of off and on must be
the same.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any


from engines.rollout.vllm_engine import VLLMEngine
from schemas.config import DraftingConfig, EngineConfig, TrainConfig
from schemas.keys import sample_key
from schemas.rollout import RequestId, Rollout, RolloutRequest, Split
from schemas.weights import PolicyWeights

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}


class StockEngine(VLLMEngine):
    """vLLM as it comes, with its own sampling."""

    speculation: dict[str, Any] = {}

    async def _install(self) -> None:
        """Nothing."""

    def _speculation_args(self) -> dict[str, Any]:
        return {"speculative_config": self.speculation} if self.speculation else {}


class StockNgramEngine(StockEngine):
    speculation = NGRAM


@dataclass(frozen=True)
class Lap:
    """One engine's pass over one step's requests."""

    engine: str
    epoch: int
    seconds: float
    rollouts: Sequence[Rollout]

    @property
    def tokens_per_s(self) -> float:
        return sum(len(r.generated.token_ids) for r in self.rollouts) / self.seconds


async def lap(engine: VLLMEngine, name: str, epoch: int, requests: Sequence[RolloutRequest]) -> Lap:
    num_before = engine._num_acknowledged
    started_s = time.perf_counter()
    await engine.submit(requests)
    finished: list[Rollout] = []
    while len(finished) < len(requests):
        events = await engine.next_events(num_before + len(finished))
        finished += events.finished
    seconds = time.perf_counter() - started_s
    await engine.next_events(num_before + len(finished))
    return Lap(name, epoch, seconds, finished)
