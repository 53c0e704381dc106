"""An engine of `refrain bench tools`. It measures how conversations use its slots and its KV
cache."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

from refrain.benchmarks.temperature_engines import DialEngine
from refrain.engines.inference.engine.admission import Admitted
from refrain.engines.inference.engine.running import Running
from refrain.schemas.rollout import Turn

TURN_TOKENS = "turn_tokens"
"""Name in a task's `extra_info` of the tokens of each turn."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Slots and KV blocks that an engine used since it was asked last."""

    slot_s: float
    """Seconds that requests were running in vLLM, summed over requests."""
    num_cached: int = 0
    """Full KV blocks that were in the prefix cache when a turn returned."""
    num_full: int = 0
    """Full KV blocks that these conversations had when their last turn ended."""


class SlotWatch:
    """Seconds of a scheduler's running requests."""

    def __init__(self, running: Callable[[], int], now: Callable[[], float]) -> None:
        """`running`: number of requests that run. `now`: seconds."""
        self._running, self._now = running, now
        self._slot_s, self._num, self._since_s = 0.0, 0, now()

    def note(self) -> None:
        """Note how many requests run from now on."""
        now_s = self._now()
        self._slot_s += self._num * (now_s - self._since_s)
        self._num, self._since_s = self._running(), now_s

    def take(self) -> float:
        """Return the slot seconds since the last call."""
        self.note()
        taken, self._slot_s = self._slot_s, 0.0
        return taken

    def after(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that notes the requests when it has run."""

        @wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.note()
            return result

        return watched


def make_watched(vllm_config: Any, **kwargs: Any) -> Any:
    """Return refrain's scheduler with the method `take_slot_s`. vLLM calls this function in place
    of a scheduler class."""
    from refrain.engines.inference.engine.scheduler import make_scheduler

    scheduler: Any = make_scheduler(vllm_config, **kwargs)
    watch = SlotWatch(lambda: len(scheduler.running), time.perf_counter)
    scheduler.schedule = watch.after(scheduler.schedule)
    scheduler.update_from_output = watch.after(scheduler.update_from_output)
    scheduler.take_slot_s = watch.take
    return scheduler


class TurnEngine(DialEngine):
    """An engine with the model's own weights, whose turns have the lengths that the task names."""

    _num_cached = _num_full = 0

    async def converse(self, on: bool) -> None:
        """Answer turns by the environment from now on, or have no environment."""
        assert not self._running, "it has requests"
        self._conversations = self._converse() if on else None

    async def take_usage(self) -> Usage:
        core: Any = self._llm.engine_core
        slot_s = await core.call_utility_async("call_scheduler", "take_slot_s", [])
        usage = Usage(slot_s, self._num_cached, self._num_full)
        self._num_cached = self._num_full = 0
        return usage

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        return super()._engine_args(on_cpu) | {
            "scheduler_cls": "refrain.benchmarks.turn_engine.make_watched"
        }

    def _admitted(self, running: Running) -> Admitted:
        own = super()._admitted(running)
        params = own.params | {"ignore_eos": True}
        if task := running.request.task:
            params["max_tokens"] = task.extra_info[TURN_TOKENS][len(_turns(running))]
        return replace(own, params=params)

    def _take_final(self, running: Running, final: Any) -> None:
        if _turns(running):
            block_tokens = self._llm.vllm_config.cache_config.block_size
            self._num_cached += (final.num_cached_tokens or 0) // block_tokens
            self._num_full += num_full_blocks(running, block_tokens)
        (output,) = final.outputs
        if running.request.task and output.finish_reason == "length":
            # The task ends its turns by their length.
            output.finish_reason = "stop"
        super()._take_final(running, final)


def num_full_blocks(running: Running, block_tokens: int) -> int:
    """Return the full KV blocks that a conversation had when its last turn ended. The last sampled
    token had no keys and values."""
    num_observed = _turns(running)[-1].num_observed or 0
    num_tokens = len(running.request.prompt_token_ids) + running.num_before - num_observed
    return (num_tokens - 1) // block_tokens


def _turns(running: Running) -> tuple[Turn, ...]:
    return running.request.generated.turns if running.request.generated else ()
