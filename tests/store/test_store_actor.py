"""The store's actor: rollouts reach it by reference, and a killed actor restarts with every
acknowledged row."""

import asyncio
import os
import pickle
import signal
from contextlib import suppress
from dataclasses import replace

import pytest
import ray

from refrain.engines.rollout.interface import EngineDied
from refrain.engines.store import actor
from refrain.engines.store.actor import StoreClient, start_store
from refrain.engines.store.rows import rollout_rows, to_stream
from refrain.schemas.rollout import Split
from tests.store.test_store import make_rollout

pytestmark = pytest.mark.engine


def test_a_killed_actor_restarts_with_its_rows(ray_cluster, tmp_path):
    store = start_store(tmp_path / "run.duckdb")
    first = rollout_rows([make_rollout(sample=0), make_rollout(sample=1)])
    assert ray_cluster.get(store.call.remote("add_rollouts", first, 0), timeout=60) == 2
    (process,) = ray_cluster.get(store.__ray_call__.remote(lambda _: [os.getpid()]), timeout=60)
    os.kill(process, signal.SIGKILL)
    again = rollout_rows([make_rollout(sample=i) for i in range(3)])
    assert ray_cluster.get(store.call.remote("add_rollouts", again, 0), timeout=120) == 1
    rows = ray_cluster.get(store.call.remote("rollouts", Split.TRAIN, 1), timeout=60)
    assert rows["sample_index"].to_pylist() == [0, 1, 2]


def test_store_that_cannot_open_explains_why(ray_cluster, tmp_path):
    (tmp_path / "run.duckdb").write_text("not a store " * 1000)
    store = start_store(tmp_path / "run.duckdb", max_restarts=0)
    with pytest.raises(ray_cluster.exceptions.RayActorError, match="is not a refrain store"):
        ray_cluster.get(store.call.remote("last_step"), timeout=60)


async def test_rows_pass_by_their_reader(ray_cluster, tmp_path):
    client = StoreClient(start_store(tmp_path / "run.duckdb"))
    rollouts = rollout_rows([make_rollout(prompt=key, tokens=40_000) for key in "ab"])
    assert await client.call("add_rollouts", rollouts, 0) == 2
    rows = await client.rows("scoring_rows", Split.TRAIN, 1)
    assert (rows.counts.num_rows, rows.counts.num_tokens) == (2, 80_000)
    assert rows.counts.prompt_keys == ("a", "b")
    assert len(pickle.dumps(rows.counts)) < 300
    reader = ray_cluster.remote(lambda table: table["prompt_key"].to_pylist())
    assert await reader.remote(rows.reference) == ["a", "b"]


class Source:
    """The part of an engine's process that makes rows."""

    def told(self, rollouts):
        return to_stream(rollout_rows(rollouts))


def told_of(rollouts, rows):
    return [replace(r.without_tokens(i), rows=rows) for i, r in enumerate(rollouts)]


async def test_rollouts_are_stored_by_reference_as_far_as_they_count(ray_cluster, tmp_path):
    client = StoreClient(start_store(tmp_path / "run.duckdb"))
    rollouts = [make_rollout(sample=i, tokens=20_000) for i in range(3)]
    source = ray_cluster.remote(Source).remote()
    told = told_of(rollouts, source.told.remote(rollouts))
    assert max(len(pickle.dumps(replace(rollout, rows=None))) for rollout in told) < 1000
    await client.add_finished([told[0], told[2]], 0)
    rows = await client.call("rollouts", Split.TRAIN, 1)
    assert rows["sample_index"].to_pylist() == [0, 2]
    ray_cluster.kill(source)  # The reported rows must outlive their engine.
    await client.add_finished(told[1:2], 0)
    rows = await client.call("rollouts", Split.TRAIN, 1)
    assert rows["response_token_ids"].to_pylist() == [[7] * 20_000] * 3


async def test_rollouts_that_are_lost_are_a_death_of_their_engine(ray_cluster, tmp_path):
    """The engine died before it reported their rows."""
    client = StoreClient(start_store(tmp_path / "run.duckdb"))
    rollouts = [make_rollout(tokens=20_000)]
    source = ray_cluster.remote(Source).remote()
    await source.told.remote(rollouts)
    ray_cluster.kill(source)
    async with asyncio.timeout(60):
        with suppress(ray.exceptions.RayActorError):
            while True:
                await source.told.remote(rollouts)
        with pytest.raises(EngineDied, match="engine 0 died: 1 finished rollouts were lost"):
            await client.add_finished(told_of(rollouts, source.told.remote(rollouts)), 0)
    assert (await client.call("rollouts", Split.TRAIN, 1)).num_rows == 0


class CountedStore(StoreClient):
    """Counts the rollouts of each write."""

    def __init__(self, actor):
        super().__init__(actor)
        self.writes = []

    async def _keep(self, batches):
        self.writes.append([len(selected) for _, selected, _ in batches])
        return await super()._keep(batches)


async def test_rollouts_that_come_together_are_one_write(ray_cluster, tmp_path):
    client = CountedStore(start_store(tmp_path / "run.duckdb"))
    rollouts = [make_rollout(sample=i, tokens=100) for i in range(6)]
    source = ray_cluster.remote(Source).remote()
    told = [
        told_of(pair, source.told.remote(pair))
        for pair in (rollouts[:2], rollouts[2:4], rollouts[4:])
    ]
    await asyncio.gather(*(client.add_finished(pair, epoch) for epoch, pair in enumerate(told)))
    assert client.writes == [[2, 2, 2]]
    rows = await client.call("rollouts", Split.TRAIN, 1)
    assert rows["sample_index"].to_pylist() == list(range(6))
    assert rows["epoch"].to_pylist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.usefixtures("ray_cluster")
async def test_a_write_is_not_larger_because_more_engines_report(tmp_path, monkeypatch):
    monkeypatch.setattr(actor, "TOKENS_AT_ONCE", 250)
    client = CountedStore(start_store(tmp_path / "run.duckdb"))
    rollouts = [make_rollout(sample=i, tokens=100) for i in range(5)]
    told = [told_of([rollout], rollout_rows([rollout])) for rollout in rollouts]
    await asyncio.gather(*(client.add_finished(one, 0) for one in told))
    assert client.writes == [[1, 1], [1, 1], [1]]
    assert (await client.call("rollouts", Split.TRAIN, 1)).num_rows == 5


async def test_lost_rollouts_of_one_engine_do_not_hold_back_those_of_others(ray_cluster, tmp_path):
    client = CountedStore(start_store(tmp_path / "run.duckdb"))
    rollouts = [make_rollout(sample=i) for i in range(2)]

    def lose():
        raise OSError("no rows")

    lost = ray_cluster.remote(lose).options(max_retries=0).remote()
    answers = await asyncio.gather(
        client.add_finished(told_of(rollouts[:1], lost), 0),
        client.add_finished(told_of(rollouts[1:], rollout_rows(rollouts[1:])), 0),
        return_exceptions=True,
    )
    assert isinstance(answers[0], EngineDied)
    assert answers[1] is None
    assert client.writes == [[1, 1]]
    rows = await client.call("rollouts", Split.TRAIN, 1)
    assert rows["sample_index"].to_pylist() == [1]
