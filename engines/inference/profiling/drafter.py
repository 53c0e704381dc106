"""A drafter that measures its own speed with the code that drafts in a run (`VLLMDrafter`).

    prompts ─► w tokens each ─► w more ─► ...     we time one arrow (window w)

All sequences of a batch advance together, as if every draft were right. The measurement leaves out
messages. It also leaves out how much engines and drafters slow each other down on shared CPU cores.

If the KV cache cannot hold all sequences, the draft model recomputes them again and again. The
measurement includes that time, because a run would spend it too.
"""

import time
from functools import partial

from refrain.engines.inference.drafting.vllm_drafter import VLLMDrafter
from refrain.engines.inference.profiling.engine import machine_facts, point_of, random_prompts
from refrain.engines.latency.grid import num_draft_windows
from refrain.schemas.drafting import DrafterConfig
from refrain.schemas.latency import ProfilePoint
from refrain.schemas.profile import MachineFacts, Measurement


class ProfilingDrafter(VLLMDrafter):
    """A drafter that measures its own speed and serves no engines."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)

    def facts(self) -> MachineFacts:
        return machine_facts(self._live)

    async def measure(
        self, measurement: Measurement, num_steps: int, seed: str
    ) -> list[ProfilePoint]:
        """Return one point: mean seconds of a window, over about `num_steps` tokens per sequence.

        `seed`: of the random prompts.
        """
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
        """Decode until each sequence has `target` tokens. `num_tokens`: drawn so far; updated."""
        while wanting := {name for name, num in num_tokens.items() if num < target}:
            for name in self._live.go_on(wanting):
                num_tokens[name] += 1
