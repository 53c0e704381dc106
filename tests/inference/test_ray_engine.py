"""The driver's side of an engine: a silent or failed engine dies with a clear error.

A fake actor stands in for the engine.
"""

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest

from refrain.engines.actors import ActorError, ActorGone
from refrain.engines.inference.engine import ray_engine
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.rollout.interface import EngineDied, EngineEvents
from refrain.schemas.counts import DraftingCounts
from refrain.schemas.engine import EngineSetup
from refrain.schemas.rollout import FinishedRollout, FinishReason
from refrain.schemas.weights import PolicyWeights
from tests.inference.real import CONFIG, requests

STALL_S = 0.4
ROLLOUT = CONFIG.engine.rollout.model_copy(update={"stall_timeout_s": STALL_S})
REQUESTS = requests([(5, 6, 7)])[:2]


class Actor:
    """Fake actor that returns these events in turn, the last one again and again.

    It raises those that are exceptions. `last_error`: its answer to that call.
    """

    def __init__(self, *told, last_error: str = "") -> None:
        self.told, self.last_error, self.num_calls = told, last_error, 0

    async def call(self, method, *_, timeout_s, **__):
        assert timeout_s > 0
        return self.last_error if method == "last_error" else None

    async def call_with_reference(self, *_, timeout_s):
        assert timeout_s > 0
        told = self.told[min(self.num_calls, len(self.told) - 1)]
        self.num_calls += 1
        if isinstance(told, Exception):
            raise told
        return told, None


async def engine_of(actor) -> RayEngine:
    engine = RayEngine(3, CONFIG.engine.model_copy(update={"rollout": ROLLOUT}), num_gpus=0)
    engine._actor = actor
    await engine.submit(REQUESTS)
    return engine


def progress(num_tokens) -> EngineEvents:
    return EngineEvents(progress={request.id: num_tokens for request in REQUESTS})


async def listen(engine, seconds):
    """Receive events for so many seconds, or until the engine dies."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + seconds
    while loop.time() < deadline_s:
        await engine.next_events()
        await asyncio.sleep(STALL_S / 10)


async def test_an_engine_without_a_new_token_for_too_long_is_dead():
    engine = await engine_of(Actor(progress(0), progress(7)))
    with pytest.raises(EngineDied, match="engine 3 died: 2 requests without a new token for"):
        await listen(engine, 100 * STALL_S)
    assert engine._actor.num_calls > 2


async def test_slow_but_moving_engine_is_not_dead():
    engine = await engine_of(Actor(*(progress(i // 3) for i in range(1000))))
    await listen(engine, 3 * STALL_S)


async def test_an_engine_without_requests_may_be_silent():
    finished = [
        FinishedRollout(r.id, 3, FinishReason.STOP, 1, 0, 0, 0, b"", row)
        for row, r in enumerate(REQUESTS)
    ]
    engine = await engine_of(Actor(EngineEvents(tuple(finished)), EngineEvents()))
    await listen(engine, 2 * STALL_S)


@pytest.mark.parametrize(
    ("error", "last_error", "told", "root"),
    [
        (
            RuntimeError("See root cause above."),
            "ValueError: head_dim",
            "It was: Val",
            "ValueError",
        ),
        (RuntimeError("See root cause above."), "", "See root cause above.", ""),
        (ValueError("head_dim 48"), "KeyError: other", "head_dim 48", "failed: head_dim 48"),
    ],
)
async def test_failure_names_its_root_cause(error, last_error, told, root):
    failed = ActorError("engine 3", f"failed: {error}", error)
    engine = await engine_of(Actor(failed, last_error=last_error))
    with pytest.raises(EngineDied) as raised:
        await engine.next_events()
    assert told in str(raised.value)
    assert raised.value.root.startswith(root)
    assert bool(raised.value.root) is bool(root)


async def test_a_death_without_a_word_has_no_root():
    engine = await engine_of(Actor(ActorGone("engine 3", "failed in next_events: ActorDiedError")))
    with pytest.raises(EngineDied) as raised:
        await engine.next_events()
    assert raised.value.root == ""


async def test_new_actor_gets_the_drafting_state(monkeypatch):
    """A new actor gets the drafting state of the last one.

    After a resume this is the state from the database, after a death the last one reported.
    """
    learnt, made = ["", "of step 3"], []

    class Remote:
        def __init__(self, *args, **_):
            made.append(args[-1].learnt)

        async def call(self, method, *_, **__):
            if method == "take_drafting_counts":
                return DraftingCounts(learnt=learnt.pop(0))
            return None

        def kill(self):
            pass

    class Room:
        options: ClassVar[dict] = {}

        def __init__(self, *_):
            pass

        async def watch(self):
            await asyncio.sleep(60)

    monkeypatch.setattr(ray_engine, "RemoteActor", Remote)
    monkeypatch.setattr(ray_engine, "Place", Room)
    engine = RayEngine(3, CONFIG.engine, num_gpus=0, setup=EngineSetup(learnt="of step 2"))
    await engine.start()
    await engine.take_drafting_counts()  # Without drafts, the engine reports no state.
    await engine.start()
    await engine.take_drafting_counts()
    await engine.start()
    assert made == ["of step 2", "of step 2", "of step 3"]


class Recorder(Actor):
    """Fake actor that records the calls of methods."""

    def __init__(self) -> None:
        super().__init__(progress(0))
        self.calls: list[tuple] = []

    async def call(self, method, *args, **named):
        self.calls.append((method, *args))
        return await super().call(method, *args, **named)


async def test_a_head_comes_with_the_weights_and_before_them():
    engine = await engine_of(actor := Recorder())
    engine._started = True
    weights = PolicyWeights(4, None, (), draft_head=Path("/run/head/4"))
    await engine.load_weights(weights)
    loaded = ("call_drafting", "load_draft_head", "/run/head/4")
    assert actor.calls[-2:] == [loaded, ("load_weights", weights)]
    assert engine._config.specactor.head == Path("/run/head/4")
    await engine.load_weights(PolicyWeights(5, None, ()))
    assert len(actor.calls) == 4
