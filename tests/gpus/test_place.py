"""When an engine has no place in the cluster any more, and when it only died."""

import asyncio
import time
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from refrain.engines.actors import ActorGone
from refrain.engines.gpus import place
from refrain.engines.gpus.cleanup import Marked
from refrain.engines.gpus.place import PLACE_S, Place, why_unplaced
from refrain.engines.inference.engine import ray_engine
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.rollout.interface import EngineDied, EngineGone
from tests.inference.real import CONFIG


@pytest.mark.parametrize(
    ("num_gpus", "node_id", "lost", "unplaced_s", "why"),
    [
        (2, None, {"b"}, PLACE_S, "no other has 2 free GPUs for it"),
        (2, None, {"b"}, PLACE_S - 1, ""),  # The killed engine may not have freed its GPUs yet.
        (2, None, (), 1e9, ""),  # More nodes may be about to join.
        (0, None, {"b"}, 1e9, ""),
        (0, "a", {"b"}, 1e9, ""),
        (0, "b", {"b"}, 0.0, "the node of its GPUs is dead"),
    ],
)
def test_why_unplaced_names_the_reason(num_gpus, node_id, lost, unplaced_s, why):
    told = why_unplaced(num_gpus, node_id, lost, unplaced_s)
    assert told.endswith(why)
    assert bool(told) is bool(why)


class Cluster:
    """A cluster of two nodes, and an actor that starts once `up` is set."""

    def __init__(self, monkeypatch) -> None:
        self.alive, self.placed, self.now_s = {"a": True, "b": True}, True, 0.0
        self.up, self.kills, self.given_back = asyncio.Event(), 0, 0
        self.error: Exception | None = None
        cluster = self

        class Actor:
            def __init__(self, name, *_, **options) -> None:
                self.name = name
                if name == "rollout engine 3":
                    cluster.options = options

            async def call(self, method, *_, timeout_s):
                if method == "end":
                    raise ActorGone("end of rollout engine 3", "failed in end: its node is dead")
                assert timeout_s == CONFIG.rollout.start_timeout_s
                if method == "mark_processes":
                    return Marked("mark", "b", ())
                assert method == "start"
                if cluster.error:
                    raise cluster.error
                return await cluster.up.wait()

            def kill(self) -> None:
                cluster.kills += self.name == "rollout engine 3"

            async def stop(self) -> None:
                self.kill()

        def remove(_) -> None:
            cluster.given_back += 1

        monkeypatch.setattr(place, "LOOK_S", 0.005)
        monkeypatch.setattr(place, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(ray_engine, "RemoteActor", Actor)
        nodes = [{"NodeID": node, "Alive": True} for node in "ab"]
        monkeypatch.setattr(
            "ray.nodes", lambda: [n | {"Alive": self.alive[n["NodeID"]]} for n in nodes]
        )
        # A function of the package has the same name and hides the module.
        groups = import_module("ray.util.placement_group")
        monkeypatch.setattr(groups, "placement_group", Mock())
        monkeypatch.setattr(groups, "remove_placement_group", remove)
        states = {True: "CREATED", False: "RESCHEDULING"}
        monkeypatch.setattr(
            groups, "placement_group_table", lambda _: {"state": states[self.placed]}
        )


@pytest.fixture
async def cluster(monkeypatch):
    return Cluster(monkeypatch)


async def engine_of(cluster, num_gpus=1, gpus=None):
    """Return an engine that has started once."""
    engine = RayEngine(3, CONFIG.engine, num_gpus, gpus=gpus)
    cluster.up.set()
    await asyncio.wait_for(engine.start(), 10)
    cluster.up.clear()
    return engine


async def test_engine_of_a_lost_node_is_gone_eventually(cluster):
    engine = await engine_of(cluster)
    restart = asyncio.create_task(engine.start())
    await asyncio.sleep(0.05)
    cluster.alive["b"] = cluster.placed = False
    await asyncio.sleep(0.05)
    cluster.now_s += PLACE_S - 1
    await asyncio.sleep(0.05)
    assert not restart.done()
    cluster.now_s += 2
    with pytest.raises(EngineGone, match="engine 3 died: a node of the cluster is dead"):
        await asyncio.wait_for(restart, 10)
    assert cluster.given_back == 1, "must free the placement group, in case the node returns"
    assert cluster.kills == 2
    await engine.shutdown()
    with pytest.raises(EngineDied, match="not started"):
        await engine.park()


async def test_engine_that_finds_room_elsewhere_is_kept(cluster):
    engine = await engine_of(cluster)
    restart = asyncio.create_task(engine.start())
    cluster.alive["b"] = cluster.placed = False
    await asyncio.sleep(0.05)
    cluster.now_s += PLACE_S - 1
    cluster.placed = True
    await asyncio.sleep(0.05)
    cluster.now_s += 600  # The engine takes this long to start.
    await asyncio.sleep(0.05)
    assert not restart.done()
    cluster.up.set()
    await asyncio.wait_for(restart, 10)
    await engine.shutdown()
    assert cluster.given_back == 1


async def test_engine_that_waits_for_new_nodes_is_kept(cluster):
    """It has waited long when another node dies. Its time for finding room begins only then."""
    engine = RayEngine(3, CONFIG.engine, num_gpus=1)
    cluster.placed = False
    start = asyncio.create_task(engine.start())
    await asyncio.sleep(0.05)
    cluster.now_s += 600
    await asyncio.sleep(0.05)
    cluster.alive["b"] = False
    await asyncio.sleep(0.05)
    assert not start.done()
    cluster.up.set()
    await asyncio.wait_for(start, 10)
    await engine.shutdown()


class Held:
    node_id = "b"


async def test_pooled_engine_is_gone_with_its_node(cluster):
    engine = await engine_of(cluster, 0, Held)
    assert cluster.options["node_id"] == "b"
    cluster.alive["b"] = False
    cluster.error = ActorGone("rollout engine 3", "failed in start: ActorUnschedulableError")
    with pytest.raises(EngineGone, match="the node of its GPUs is dead"):
        await engine.start()


async def test_engine_that_fails_in_place_has_only_died(cluster):
    engine = await engine_of(cluster)
    cluster.error = ActorGone("rollout engine 3", "failed in start: ActorDiedError")
    with pytest.raises(EngineDied) as raised:
        await engine.start()
    assert not isinstance(raised.value, EngineGone)
    await engine.shutdown()


async def test_engine_without_gpus_may_be_anywhere(cluster):
    engine = await engine_of(cluster, 0)
    assert cluster.options["num_gpus"] == 0
    cluster.alive["b"] = False
    cluster.up.set()
    await asyncio.wait_for(engine.start(), 10)
    await engine.shutdown()
    assert not cluster.given_back


@pytest.mark.usefixtures("cluster")
async def test_silence_is_no_loss(monkeypatch):
    there = Place(1)
    monkeypatch.setattr(place, "ANSWER_S", 0.01)
    monkeypatch.setattr("ray.nodes", lambda: time.sleep(0.1) or [])
    assert await there.look() == ""
