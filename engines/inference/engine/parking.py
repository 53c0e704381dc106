"""Parking: an engine leaves its GPUs to those of another layout (PAT, section 4), and comes back.
Sleeping: it leaves them to the trainer, at work or parked, and has new weights when it comes back.

                     weights kept                weights not kept               on a CPU
    parked           no KV cache                 neither                        as before
    takes weights    yes, unchecked until then   no                             yes
    woken            KV cache, empty             weights, then KV cache         as before
    asleep           neither                     neither                        no KV cache
    woken            weights, then KV cache      likewise                       KV cache, empty

Its processes, their connections and its captured graphs stay: they are what takes long to make.
Weights that were left have no values: their memory is taken when new ones come, and that of the KV
cache behind them, so that both copies of the weights are there for as short as can be.
Deviation: the paper reshards one process group in place; here each layout has its own, so that
nothing is resharded, for the memory of a parked one.
"""

from typing import Any, Protocol


class Memory(Protocol):
    """Memory that an engine has while it works, and may leave."""

    has_weights: bool
    has_kv_cache: bool

    async def leave(self, *, weights: bool) -> None:
        """Leave the KV cache, and with `weights` all else that is large. No request is there."""
        ...

    async def take_weights(self) -> None:
        """Take memory for weights again; what it holds is not known."""
        ...

    async def take_kv_cache(self) -> None:
        """Take the KV cache again, empty, and let generation go on."""
        ...


class SleepMode:
    """Memory of GPUs: vLLM's sleep mode. `llm`: its `AsyncLLM`, with `enable_sleep_mode`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.has_weights = self.has_kv_cache = True

    async def leave(self, *, weights: bool) -> None:
        if weights and self.has_weights:
            # Sleep of level 1 would copy the weights to the host, and back over new ones.
            await self._llm.sleep(level=2)
            self.has_weights = False
        elif self.has_kv_cache:
            await self._llm.pause_generation(mode="abort", clear_cache=True)
            await self._llm.release_kv_cache_memory()
        self.has_kv_cache = False

    async def take_weights(self) -> None:
        if not self.has_weights:
            await self._llm.wake_up(["weights"])
            self.has_weights = True

    async def take_kv_cache(self) -> None:
        if not self.has_kv_cache:
            # vLLM goes on once it has all of its memory.
            await self._llm.wake_up(["kv_cache"])
            await self._llm.reset_prefix_cache()
            self.has_kv_cache = True


class HostMemory:
    """Memory of a CPU's host: parked it is as before, asleep the KV cache's goes to others. Weights
    stay: they are packed into other tensors, and as large as what the trainer's take anyway."""

    has_weights = True

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.has_kv_cache = True

    async def leave(self, *, weights: bool) -> None:
        if weights and self.has_kv_cache:
            await self._llm.pause_generation(mode="abort", clear_cache=True)
            await self._llm.collective_rpc("release_kv_cache")
            self.has_kv_cache = False

    async def take_weights(self) -> None:
        pass

    async def take_kv_cache(self) -> None:
        if not self.has_kv_cache:
            await self._llm.reset_prefix_cache()
            await self._llm.resume_generation()
            self.has_kv_cache = True
