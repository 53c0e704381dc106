"""Parking in vLLM's sleep mode, with an engine that writes down what it is told."""

from dataclasses import dataclass, field

from engines.inference.engine.parking import SleepMode


@dataclass
class FakeLLM:
    """Has weights and a KV cache on its GPUs, as vLLM's executor counts them."""

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
        assert not self.resident & set(tags), "vLLM wakes nothing then"
        self.resident |= set(tags)
        self.paused = False
        self.prefix_cache_is_empty = False
        return True

    async def reset_prefix_cache(self) -> None:
        assert "kv_cache" in self.resident
        self.prefix_cache_is_empty = True


async def test_kept_weights_stay_and_the_cache_goes():
    llm = FakeLLM()
    parking = SleepMode(llm, keeps_weights=True)
    for _ in range(2):
        await parking.park()
        assert llm.resident == {"weights"}
        assert await parking.wake()
        assert llm.resident == {"weights", "kv_cache"}
        assert llm.prefix_cache_is_empty
        assert not llm.paused


async def test_without_its_weights_it_says_so():
    llm = FakeLLM()
    parking = SleepMode(llm, keeps_weights=False)
    for _ in range(2):
        await parking.park()
        assert llm.resident == set()
        assert not await parking.wake()
        assert llm.resident == {"weights", "kv_cache"}
        assert llm.prefix_cache_is_empty
        assert not llm.paused
