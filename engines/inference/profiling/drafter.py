"""A draft model that measures itself, on the path that drafting takes: `VLLMDrafter`.

    texts ─► w tokens each ─► w more ─► ...     timed: one arrow

All sequences of a batch go on together, as when every draft was right. Not measured: messages, and
how engines and drafters slow each other down where they share the cores of a CPU.

A draft model whose KV cache does not hold all the texts computes them again and again, which is
measured too, as it would do so in a run.
"""

import time
from functools import partial

from engines.inference.drafting.vllm_drafter import VLLMDrafter
from engines.inference.profiling.engine import machine_facts, point_of, random_prompts
from engines.latency.grid import num_draft_windows
from schemas.drafting import DrafterConfig
from schemas.latency import ProfilePoint
from schemas.profile import MachineFacts, Measurement


class ProfilingDrafter(VLLMDrafter):
    """A drafter that measures itself, and serves nobody else."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)

    def facts(self) -> MachineFacts:
        return machine_facts(self._live)

    async def measure(
        self, measurement: Measurement, num_steps: int, seed: str
    ) -> list[ProfilePoint]:
        """One point: the mean over about `num_steps` tokens of each text; `seed` makes those."""
        assert measurement.drafter == self._config.name
        return [await self._in_thread(partial(self._measure, measurement, num_steps, seed))]

    def _measure(self, measurement: Measurement, num_steps: int, seed: str) -> ProfilePoint:
        num_tokens = {}
        for key, text in enumerate(random_prompts(self._live, measurement, seed)):
            num_tokens[f"measured-{key}"] = 0
            self._live.open(f"measured-{key}", text, **self._params(key))
        self._draft_until(num_tokens, 1)
        num_windows = num_draft_windows(num_steps, measurement.window)
        started_s = time.perf_counter()
        self._draft_until(num_tokens, 1 + num_windows * measurement.window)
        seconds = (time.perf_counter() - started_s) / num_windows
        for name in num_tokens:
            self._live.close(name)
        return point_of(measurement, seconds, num_windows)

    def _draft_until(self, num_tokens: dict[str, int], target: int) -> None:
        """Go on with each sequence until it has drawn so many tokens; `num_tokens`: as it has."""
        while wanting := {name for name, num in num_tokens.items() if num < target}:
            for name in self._live.go_on(wanting):
                num_tokens[name] += 1
