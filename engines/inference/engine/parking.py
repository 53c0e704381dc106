"""Parking: an engine leaves its GPUs to those of another layout (PAT, section 4), and comes back.

                     weights kept                weights not kept               on a CPU
    parked           no KV cache                 neither                        as before
    takes weights    yes, unchecked until then   no                             yes
    woken            KV cache, empty             both, weights to be loaded     as before

Its processes, their connections and its captured graphs stay: they are what takes long to make.
Deviation: the paper reshards one process group in place; here each layout has its own, so that
nothing is resharded, for the memory of a parked one.
"""

from typing import Any


class SleepMode:
    """Parking on GPUs: vLLM's sleep mode. `llm`: its `AsyncLLM`, with `enable_sleep_mode`."""

    def __init__(self, llm: Any, keeps_weights: bool) -> None:
        self._llm = llm
        self._keeps_weights = keeps_weights

    async def park(self) -> None:
        if self._keeps_weights:
            # Sleep of level 1 would copy the weights to the host and back.
            await self._llm.pause_generation(mode="abort", clear_cache=True)
            await self._llm.release_kv_cache_memory()
        else:
            await self._llm.sleep(level=2)

    async def wake(self) -> bool:
        """Take the GPUs again, and let generation go on; whether the weights are there."""
        await self._llm.wake_up(["kv_cache"] if self._keeps_weights else None)
        await self._llm.reset_prefix_cache()
        return self._keeps_weights
