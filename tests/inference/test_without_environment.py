"""A run without an environment pays nothing for those that have one."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from refrain.engines.gpus.placement import GpuPlacement
from refrain.engines.inference.engine import vllm_engine
from refrain.engines.inference.engine.conversations import Conversations
from refrain.engines.inference.engine.running import Running
from refrain.engines.inference.engine.vllm_engine import VLLMEngine
from refrain.schemas.environment import EnvironmentConfig
from refrain.schemas.rollout import FinishReason
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


def test_an_engine_with_an_environment_has_conversations() -> None:
    """Control: the test above looks where they would be."""
    with_one = CONFIG.engine.model_copy(update={"environment": ENVIRONMENT})
    assert isinstance(VLLMEngine(0, with_one)._conversations, Conversations)
    assert VLLMEngine(0, CONFIG.engine)._conversations is None
