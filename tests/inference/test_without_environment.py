"""A run without an environment pays nothing for those that have one."""

import asyncio
import sys
from collections import Counter
from contextlib import AsyncExitStack
from types import FrameType
from typing import Any

import pytest

from refrain.engines.environment.client import TurnAnswer
from refrain.engines.gpus.placement import GpuPlacement
from refrain.engines.inference.engine import vllm_engine
from refrain.engines.inference.engine.conversations import Conversations, TurnLimits
from refrain.engines.inference.engine.running import Running
from refrain.engines.inference.engine.vllm_engine import VLLMEngine
from refrain.schemas.environment import EnvironmentConfig
from refrain.schemas.rollout import FinishReason, RolloutRequest
from refrain.tasks.run import environments
from refrain.tasks.run.environments import start_environments
from tests.inference.real import CONFIG, requests
from tests.inference.test_events import Speaks, final_of, output_of

ENVIRONMENT = EnvironmentConfig(path="mine.py")  # ty: ignore[invalid-argument-type]


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("this is for runs with an environment")


async def test_no_actor_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "RemoteActor", refused)
    monkeypatch.setattr("ray.get_runtime_context", refused)
    with_one = CONFIG.model_copy(update={"environment": ENVIRONMENT})
    async with AsyncExitStack() as stack:
        await start_environments(CONFIG, stack, GpuPlacement())
        assert not stack.pop_all()._exit_callbacks
        with pytest.raises(AssertionError, match="with an environment"):
            await start_environments(with_one, stack, GpuPlacement())


async def test_a_response_is_reported_without_a_copy_of_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine has no `Conversations` and starts no task. It reports the tokens that it made of
    vLLM's output, not a copy, and they are one range however many they are."""
    monkeypatch.setattr(vllm_engine, "Conversations", refused)
    (request, *_) = requests([(5, 6, 7)])
    whole = Running(request, 0, 0.0).generated_with(output_of(range(10_000)))
    monkeypatch.setattr(Running, "generated_with", lambda *_: whole)
    engine = Speaks(final_of(output_of(range(10_000))))
    await engine.submit([request])
    (rollout,) = engine._finished
    assert rollout.generated is whole
    assert (whole.turns, whole.sampled) == ((), (range(10_000),))
    assert rollout.finish_reason is FinishReason.STOP
    assert asyncio.all_tasks() == {asyncio.current_task()}


OF_ENVIRONMENTS = ("engines/environment/", "engines/inference/engine/conversations.py")
"""Code that only runs with an environment should run."""


async def calls(engine: VLLMEngine, num_requests: int) -> Counter[str]:
    """Return the Python calls of refrain's files while the engine takes requests, gets their tokens
    from vLLM and reports them."""
    found = Counter[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/engines/" in (name := frame.f_code.co_filename):
            found["engines/" + name.rpartition("/engines/")[2]] += 1

    todo = requests([(5, 6, 7)] * (num_requests // 4))
    sys.setprofile(note)
    try:
        await engine.submit(todo)
        events, _ = await engine.next_events(0)
    finally:
        sys.setprofile(None)
    assert len(events.finished) == num_requests
    return found


async def test_no_code_of_environments_runs_in_a_step() -> None:
    """And the code of a request runs once, however many tokens it has. So a step takes as long as
    if there were no environments in refrain."""
    few, more = await calls(speaking(10), 8), await calls(speaking(10), 16)
    assert not [name for name in few if name.startswith(OF_ENVIRONMENTS)]
    assert await calls(speaking(10_000), 8) == few
    per_request = {name: (more[name] - few[name]) / 8 for name in more}
    assert sum(per_request.values()) < 100, per_request


class Ends:
    """An environment that ends each conversation."""

    async def answer(self, _: RolloutRequest) -> TurnAnswer:
        return TurnAnswer(None, 1.0)

    async def end(self, request: RolloutRequest, _: FinishReason) -> TurnAnswer:
        return await self.answer(request)


async def test_calls_with_an_environment_are_seen() -> None:
    """Control: the test above looks where they would be."""
    engine = speaking(10)
    engine._conversations = Conversations(
        Ends(), TurnLimits(4), engine._go_on, engine._finish, engine._fail
    )
    found = await calls(engine, 8)
    assert sum(num for name, num in found.items() if name.startswith(OF_ENVIRONMENTS)) >= 8


def speaking(num_tokens: int) -> VLLMEngine:
    return Speaks(final_of(output_of(range(num_tokens))))


def test_an_engine_with_an_environment_has_conversations() -> None:
    """Control: the test above looks where they would be."""
    with_one = CONFIG.engine.model_copy(update={"environment": ENVIRONMENT})
    assert isinstance(VLLMEngine(0, with_one)._conversations, Conversations)
    assert VLLMEngine(0, CONFIG.engine)._conversations is None
