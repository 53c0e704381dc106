"""An engine frees the memory of its GPUs for others and takes it back later.

Parking leaves the GPUs to engines of another layout (PAT, section 4). Sleeping leaves them to the
trainer; the engine gets new weights when it wakes. A parked engine can sleep too.

                           weights kept                 weights not kept          on a CPU
    parked: frees          KV cache                     weights and KV cache      nothing
      can load weights?    yes, canary check at wake    no                        yes
      wake: allocates      KV cache (empty)             weights, then KV cache    nothing
    asleep: frees          weights and KV cache         weights and KV cache      KV cache
      wake: allocates      weights, then KV cache       weights, then KV cache    KV cache (empty)

The processes, their connections and the captured graphs stay, because they take long to create.
Freed weights lose their values. We allocate their memory when new weights arrive, and the KV cache
after that. So two copies of the weights exist for as short a time as possible.

Deviation from the paper: PAT reshards one process group in place. Here each layout has its own
engine, so nothing is resharded, but a parked engine still takes some memory.
"""

from typing import Any, Protocol


class Memory(Protocol):
    """Memory that an engine uses while it generates, and can free."""

    has_weights: bool
    has_kv_cache: bool

    async def leave(self, *, weights: bool) -> None:
        """Free the KV cache, and with `weights` the weights too. The engine must be empty."""
        ...

    async def take_weights(self) -> None:
        """Allocate the memory of the weights again, with undefined values."""
        ...

    async def take_kv_cache(self) -> None:
        """Allocate an empty KV cache and resume generation."""
        ...


class SleepMode:
    """GPU memory, freed by vLLM's sleep mode. `llm`: an `AsyncLLM` with `enable_sleep_mode`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.has_weights = self.has_kv_cache = True

    async def leave(self, *, weights: bool) -> None:
        if weights and self.has_weights:
            # Level 1 would copy the weights to the host, and later back over the new ones.
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
            # vLLM resumes generation when all its memory is there.
            await self._llm.wake_up(["kv_cache"])
            await self._llm.reset_prefix_cache()
            self.has_kv_cache = True


class HostMemory:
    """Host memory of a CPU engine. Parking frees nothing; sleeping frees the KV cache.

    The weights stay: vLLM has packed them into other tensors, which take as much as the trainer's.
    """

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
