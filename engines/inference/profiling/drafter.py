"""A draft model that measures itself, on the path that drafting takes: `VLLMDrafter`.

    texts ─► w tokens each ─► texts and those ─► w tokens each ─► ...     timed: one arrow

All sequences of a batch are drafted for at once, a window being one request after the text so far,
as when every draft was right. So the time of a window includes what a request costs beyond its
tokens: handing it in, and computing again the end of the text that the prefix cache, which knows
whole blocks only, does not hold.

A draft model whose KV cache does not hold all the texts computes them again and again, which is
measured too, as it would do so in a run. Not measured: how engines and drafters slow each other
down where they share the cores of a CPU.
"""

import asyncio
import time
from typing import Any

from engines.inference.drafting.vllm_drafter import VLLMDrafter
from engines.inference.profiling.engine import machine_facts, point_of, random_prompts
from engines.latency.grid import num_draft_windows
from schemas.drafting import DrafterConfig
from schemas.latency import ProfilePoint
from schemas.profile import MachineFacts, Measurement


class ProfilingDrafter(VLLMDrafter):
    """A drafter that measures itself, and serves nobody else."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, alone=True)

    def facts(self) -> MachineFacts:
        return machine_facts(self._llm)

    async def measure(
        self, measurement: Measurement, num_steps: int, seed: str
    ) -> list[ProfilePoint]:
        """One point: the mean over about `num_steps` tokens of each text; `seed` makes those."""
        assert measurement.drafter == self._config.name
        texts = random_prompts(self._llm, measurement, seed)
        await self._draft_after(texts, 1)
        num_windows = num_draft_windows(num_steps, measurement.window)
        started_s = time.perf_counter()
        for _ in range(num_windows):
            texts = await self._draft_after(texts, measurement.window)
        seconds = (time.perf_counter() - started_s) / num_windows
        return [point_of(measurement, seconds, num_windows)]

    async def _draft_after(self, texts: list[list[int]], window: int) -> list[list[int]]:
        """The texts with a window more each; the sample key is the place in the batch."""
        drafts = await asyncio.gather(
            *(self._generate(key, text, window) for key, text in enumerate(texts))
        )
        return [[*text, *draft.token_ids] for text, draft in zip(texts, drafts, strict=True)]

    def _params(self, sample_key: int, num_tokens: int) -> dict[str, Any]:
        # Random texts may seem to be at their end.
        return super()._params(sample_key, num_tokens) | {"ignore_eos": True}
