"""Both sides of a hand-over, without a GPU and without vLLM.

The tests check the calls and their order, and which engines the trainer leaves out.
"""

import asyncio
import base64
import pickle
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refrain.engines.inference.engine.parking import SleepMode
from refrain.engines.inference.engine.vllm_engine import VLLMEngine
from refrain.engines.inference.weights import canary
from refrain.engines.inference.weights.hand_over import EnginesOfTrainer, HandOver
from refrain.engines.inference.weights.received_weights import HandedWeights
from refrain.schemas.weights import PolicyWeights
from tests.inference.real import CONFIG
from tests.inference.test_parking import FakeLLM


class Told(FakeLLM):
    """Fake of vLLM that records each call, with the memory on its GPUs at that time."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, frozenset[str]]] = []
        self.under_way = False

    def note(self, what: str) -> None:
        self.told.append((what, frozenset(self.resident)))

    async def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.note(f"init {request}")

    async def start_weight_update(self) -> None:
        assert not self.under_way, "a weight update is already active"
        assert "weights" in self.resident
        self.under_way = True
        self.note("start")

    async def update_weights(self, request: dict[str, Any]) -> None:
        assert self.under_way
        self.note(f"update {request}")

    async def finish_weight_update(self, version: str) -> None:
        self.under_way = False
        self.note(f"finish {version}")

    async def collective_rpc(self, method: str) -> list[list[str]] | None:
        if method == "stale_layers":
            return [[]]
        assert method == "abandon_weight_update"
        self.under_way = False
        self.note("abandon")
        return None


@asynccontextmanager
async def a_file(_: PolicyWeights) -> AsyncIterator[Path]:
    yield Path("file")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> VLLMEngine:
    """An engine with fakes for vLLM, its memory and its files."""
    name = "vllm.distributed.weight_transfer.base"
    requests = {f"WeightTransfer{what}Request": dict for what in ("Init", "Update")}
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**requests))
    made = VLLMEngine(0, CONFIG.engine)
    llm = made._llm = Told()
    made._memory = SleepMode(llm)
    made._handed = HandedWeights(llm, made._memory)
    made._saving = SimpleNamespace(clear=lambda: None)
    monkeypatch.setattr(made._sources, "file_of", a_file)

    async def canaries(*_: Any) -> list[list[float]]:
        llm.note("canary")
        return []

    monkeypatch.setattr(canary, "engine_logprobs", canaries)
    monkeypatch.setattr(llm, "reset_prefix_cache", nothing)
    return made


async def nothing() -> None:
    pass


async def hand(engine: VLLMEngine, version: int, *, to_the_end: bool = True) -> None:
    await engine.take_handed("init_weight_transfer_engine", {"packed": True})
    await engine.take_handed("start_weight_update")
    await engine.take_handed("update_weights", {"names": ["w"]})
    if to_the_end:
        await engine.take_handed("finish_weight_update", version)


def weights(version: int) -> PolicyWeights:
    return PolicyWeights(version, b"", ())


NOTHING, WEIGHTS = frozenset[str](), frozenset({"weights"})
BOTH = frozenset({"weights", "kv_cache"})
HANDED = [
    ("init {'packed': True}", NOTHING),
    ("start", WEIGHTS),
    ("update {'names': ['w']}", WEIGHTS),
]
LOADED = [("start", WEIGHTS), ("update {'path': 'file'}", WEIGHTS)]


async def test_weights_wake_for_the_hand_over_and_the_cache_for_the_canary(engine):
    for version in (1, 2):
        engine._llm.told.clear()
        await engine.sleep()
        await hand(engine, version)
        assert engine._llm.resident == WEIGHTS
        assert not await engine.wake()
        await engine.load_weights(weights(version))
        assert engine._llm.told == [*HANDED, (f"finish {version}", WEIGHTS), ("canary", BOTH)]
        with pytest.raises(AssertionError, match="not asleep"):
            await hand(engine, version)


async def test_interrupted_hand_over_ends_before_the_file_loads(engine):
    """The engine ends an interrupted hand-over before it loads the file."""
    await engine.sleep()
    await hand(engine, 1, to_the_end=False)
    await engine.load_weights(weights(1))
    assert engine._llm.told == [
        *HANDED,
        ("abandon", WEIGHTS),
        *LOADED,
        ("finish 1", WEIGHTS),
        ("canary", BOTH),
    ]


async def test_interrupted_hand_over_ends_before_another_begins(engine):
    """The engine ends an interrupted hand-over before it begins another."""
    await engine.sleep()
    await hand(engine, 1, to_the_end=False)
    await hand(engine, 1)
    assert [what for what, _ in engine._llm.told if what in ("start", "abandon")] == [
        "start",
        "abandon",
        "start",
    ]


@pytest.mark.parametrize("asleep_between", [False, True])
async def test_others_are_not_taken_for_them(engine, asleep_between):
    """Handed weights of another version, or from before a sleep, are not used."""
    await engine.sleep()
    await hand(engine, 1)
    if asleep_between:
        await engine.sleep()
    await engine.load_weights(weights(1 if asleep_between else 2))
    assert LOADED[1] in engine._llm.told


async def test_handed_weights_serve_one_load(engine):
    """Handed weights serve one load. A second load of the same version reads the file."""
    await engine.sleep()
    await hand(engine, 1)
    await engine.load_weights(weights(1))
    await engine.load_weights(weights(1))
    assert ("update {'path': 'file'}", BOTH) in engine._llm.told


class Handle:
    """Fake of an engine's Ray handle. At the method `at` it raises `failure`, or never answers."""

    def __init__(self, failure: Any = None, at: str = "update_weights") -> None:
        self.failure, self.at = failure, at
        self.told: list[tuple[Any, ...]] = []
        self.take_handed = self

    async def _answer(self, method: str) -> None:
        if method == self.at:
            if self.failure == "silent":
                await asyncio.sleep(60)
            elif self.failure:
                raise self.failure

    def remote(self, method: str, *args: Any) -> Any:
        self.told.append((method, *args))
        return self._answer(method)


HANDLES = {"GPU-0": (1, 2), "GPU-1": (3, 4)}
CALLS = ["init_weight_transfer_engine", "start_weight_update", *["update_weights"] * 2]


def send(client: EnginesOfTrainer) -> None:
    client.init_weight_transfer_engine({"packed": True})
    client.start_weight_update()
    for i in range(2):
        client.update_weights({"names": [f"w{i}"], "ipc_handles": HANDLES})
    client.finish_weight_update()


def test_all_engines_receive_the_same_handles():
    handles = {0: Handle(), 3: Handle()}
    send(client := EnginesOfTrainer(HandOver(handles, 1.0), 7))
    assert not client.failures
    assert handles[0].told == handles[3].told
    assert [method for method, *_ in handles[0].told] == [*CALLS, "finish_weight_update"]
    assert handles[0].told[-1] == ("finish_weight_update", 7)
    update = handles[3].told[2][1]
    assert update.keys() == {"names", "ipc_handles_pickled"}
    assert pickle.loads(base64.b64decode(update["ipc_handles_pickled"])) == HANDLES


def test_failed_or_silent_engines_are_named_and_skipped():
    from ray.exceptions import ActorDiedError, RayTaskError

    failed = RayTaskError("update_weights", "", ValueError("no such GPU"))
    handles = {0: Handle(), 1: Handle("silent"), 2: Handle(ActorDiedError()), 3: Handle(failed)}
    send(client := EnginesOfTrainer(HandOver(handles, 0.2), 7))
    assert client.failures == [
        "rollout engine 1 gave no answer to take_handed in 0 s",
        "rollout engine 2 failed in take_handed: ActorDiedError",
        "rollout engine 3 failed in take_handed: ValueError: no such GPU",
    ]
    assert [method for method, *_ in handles[0].told] == [*CALLS, "finish_weight_update"]
    assert all([m for m, *_ in handles[i].told] == CALLS[:3] for i in (1, 2, 3))


def test_hand_over_without_engines_does_not_wait():
    send(client := EnginesOfTrainer(HandOver({}, 1.0), 7))
    assert not client.failures
