"""Parking in vLLM's sleep mode makes the right calls in the right order, on a fake engine."""

from dataclasses import dataclass, field

import pytest

from refrain.engines.inference.engine.parking import SleepMode


@dataclass
class FakeLLM:
    """Fake of vLLM that tracks the memory on its GPUs, as vLLM's executor does."""

    resident: set[str] = field(default_factory=lambda: {"weights", "kv_cache"})
    paused: bool = False
    prefix_cache_is_empty: bool = False

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("abort", True)
        self.paused = True

    async def release_kv_cache_memory(self) -> None:
        assert self.paused
        assert self.resident == {"weights", "kv_cache"}
        self.resident.remove("kv_cache")

    async def sleep(self, level: int) -> None:
        assert level == 2, "level 1 copies the weights to the host"
        self.paused, self.resident = True, set()

    async def wake_up(self, tags: list[str] | None) -> bool:
        tags = tags or ["weights", "kv_cache"]
        assert not self.resident & set(tags), "vLLM ignores a wake-up of memory that is awake"
        self.resident |= set(tags)
        self.paused = self.resident != {"weights", "kv_cache"}
        self.prefix_cache_is_empty = False
        return not self.paused

    async def reset_prefix_cache(self) -> None:
        assert "kv_cache" in self.resident
        self.prefix_cache_is_empty = True


async def test_kept_weights_stay_and_the_cache_goes():
    llm = FakeLLM()
    memory = SleepMode(llm)
    for _ in range(2):
        await memory.leave(weights=False)
        assert llm.resident == {"weights"}
        await memory.take_weights()
        assert llm.paused
        await memory.take_kv_cache()
        assert llm.resident == {"weights", "kv_cache"}
        assert llm.prefix_cache_is_empty
        assert not llm.paused


@pytest.mark.parametrize("parked", [False, True])
async def test_asleep_it_has_neither_and_takes_weights_first(parked):
    llm = FakeLLM()
    memory = SleepMode(llm)
    for _ in range(2):
        if parked:
            await memory.leave(weights=False)
        await memory.leave(weights=True)
        await memory.leave(weights=True)
        assert llm.resident == set()
        assert not memory.has_weights
        await memory.take_weights()
        assert llm.resident == {"weights"}
        assert llm.paused
        await memory.take_kv_cache()
        assert llm.resident == {"weights", "kv_cache"}
        assert llm.prefix_cache_is_empty
        assert not llm.paused
