"""The store's actor: killed, it comes back with every acknowledged row."""

import os
import pickle
import signal

import pytest

from engines.store.actor import StoreClient, start_store
from schemas.rollout import Split
from tests.store.test_store import make_rollout

pytestmark = pytest.mark.engine


def test_a_killed_actor_restarts_with_its_rows(ray_cluster, tmp_path):
    store = start_store(tmp_path / "run.duckdb")
    first = [make_rollout(sample=0), make_rollout(sample=1)]
    assert ray_cluster.get(store.call.remote("add_rollouts", first, 0), timeout=60) == 2
    (process,) = ray_cluster.get(store.__ray_call__.remote(lambda _: [os.getpid()]), timeout=60)
    os.kill(process, signal.SIGKILL)
    again = [*first, make_rollout(sample=2)]
    assert ray_cluster.get(store.call.remote("add_rollouts", again, 0), timeout=120) == 1
    rows = ray_cluster.get(store.call.remote("rollouts", Split.TRAIN, 1), timeout=60)
    assert rows["sample_index"].to_pylist() == [0, 1, 2]


def test_a_store_that_cannot_be_opened_says_why(ray_cluster, tmp_path):
    (tmp_path / "run.duckdb").write_text("not a store " * 1000)
    store = start_store(tmp_path / "run.duckdb", max_restarts=0)
    with pytest.raises(ray_cluster.exceptions.RayActorError, match="is not a refrain store"):
        ray_cluster.get(store.call.remote("last_step"), timeout=60)


async def test_rows_pass_by_their_reader(ray_cluster, tmp_path):
    client = StoreClient(start_store(tmp_path / "run.duckdb"))
    rollouts = [make_rollout(prompt=key, tokens=40_000) for key in "ab"]
    assert await client.call("add_rollouts", rollouts, 0) == 2
    rows = await client.rows("scoring_rows", Split.TRAIN, 1)
    assert (rows.counts.num_rows, rows.counts.num_tokens) == (2, 80_000)
    assert rows.counts.prompt_keys == ("a", "b")
    assert len(pickle.dumps(rows.counts)) < 300
    reader = ray_cluster.remote(lambda table: table["prompt_key"].to_pylist())
    assert await reader.remote(rows.reference) == ["a", "b"]
