"""A run with several nodes: which one answers a sample, and what happens when it dies."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from refrain.engines.actors import ActorGone
from refrain.engines.environment import client
from refrain.engines.environment.client import EnvironmentClient, name_of, share_of
from refrain.engines.gpus.placement import GpuPlacement
from refrain.schemas.environment import EnvironmentConfig
from refrain.schemas.rollout import Generated, RequestId, RolloutRequest, Split
from refrain.tasks.run.environments import run_nodes
from tests.conftest import REPOSITORY

CONFIG = EnvironmentConfig(path=Path("mine.py"), max_turns=1, timeout_s=1.0)


class Actor:
    """An actor that fails with these errors first."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), list[tuple[Any, ...]]()

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        assert timeout_s > 0
        if self.errors:
            raise ActorGone("it", "is gone") from self.errors.pop(0)
        self.calls.append((method, *args))
        return [f"{method} of {len(args)}"]


def client_of(monkeypatch: pytest.MonkeyPatch, *actors: Actor) -> EnvironmentClient:
    monkeypatch.setattr(client, "AGAIN_S", 0.01)
    own = EnvironmentClient(CONFIG)
    own._actors = list(actors)  # ty: ignore[invalid-assignment]
    return own


def id_of(sample: int, step: int = 1) -> RequestId:
    return RequestId(Split.TRAIN, step, "a", sample)


def request_of(id: RequestId) -> RolloutRequest:
    return RolloutRequest(id, (1,), 0, 9, generated=Generated([1], [0.0], ()))


def test_samples_are_spread_over_the_nodes() -> None:
    counts = Counter(share_of(str(id_of(sample)), 4) for sample in range(1000))
    assert sorted(counts) == [0, 1, 2, 3]
    assert min(counts.values()) > 200


async def test_a_sample_asks_the_same_actor_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is deferred, because it keeps its environment."""
    actors = Actor(), Actor(), Actor()
    own = client_of(monkeypatch, *actors)
    for sample in range(30):
        await own.answer(request_of(id_of(sample)))
        await own.answer(request_of(id_of(-1 - sample, step=2)))
    await own.finished([id_of(sample) for sample in range(30)])
    for actor in actors:
        *asked, (_, finished) = actor.calls
        assert Counter(str(id) for _, id, *_ in asked) == dict.fromkeys(finished, 2)
    assert await own.written([id_of(0)]) == {"written of 1"}
    assert sum(len(actor.calls) for actor in actors) == 64


async def test_an_actor_that_restarts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor(*[ActorUnavailableError("its node is dead", b"0" * 16)] * 3)
    own = client_of(monkeypatch, actor)
    assert await own.answer(request_of(id_of(0))) == ["answer of 3"]


@pytest.mark.parametrize("how", ["for good", "too long"])
async def test_an_actor_that_does_not_come_back_is_an_error(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    error = ActorUnavailableError("its node is dead", b"0" * 16)
    monkeypatch.setattr(client, "WRITTEN_S", 0.1)
    actor = Actor(*([ActorDiedError()] if how == "for good" else [error] * 1000))
    with pytest.raises(ActorGone, match="is gone"):
        await client_of(monkeypatch, actor).written([id_of(0)])
    assert len(actor.errors) in (0, *range(900, 1000))


def test_the_names_give_the_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may be dead for good."""
    there = ["store", name_of(1, 3), name_of(2, 3), "environment-of-mine"]
    monkeypatch.setattr("ray.util.list_named_actors", lambda: there)
    assert client.names() == [name_of(share, 3) for share in range(3)]
    monkeypatch.setattr("ray.util.list_named_actors", lambda: ["store"])
    with pytest.raises(ValueError, match="start_environments comes first"):
        client.names()


def test_nodes_with_gpus_of_the_run_have_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeID": name, "Alive": name != "dead", "NodeManagerAddress": f"at {name}"}
        for name in ("c", "here", "a", "dead", "b")
    ]
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    placement = GpuPlacement(4, {"engine 0": ("b", "b"), "trainer": ("c",)})
    assert list(run_nodes(placement)) == ["here", "b", "c"]
    # Without GPUs, an engine may start on any node.
    assert run_nodes(GpuPlacement()) == {name: f"at {name}" for name in ("here", "a", "b", "c")}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_turn_is_executed_once_on_two_nodes_and_after_the_death_of_one(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.environment.nodes", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=500.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"answers"'))
    shown = json.loads(line)
    assert (shown["nodes"], shown["answers"], shown["written"]) == (2, 96, 16)
    assert shown["other"] == 0
    # 16 samples with two turns. Each was asked for three times, and once more after the death.
    assert (shown["calls"], shown["calls_again"], shown["calls_after"]) == (32, 32, 48)
    assert shown["again_s"] < 120.0
