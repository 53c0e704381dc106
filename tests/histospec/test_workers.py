"""History workers on Ray: whatever happens to them or their files, histories come back."""

import asyncio
import os
import signal

import pyarrow as pa
import pytest

from engines.histospec.index_file import index_path, open_index
from engines.histospec.workers import HistoryWorkers, histories
from engines.store.tables import INDEXED
from schemas.drafting import DraftingConfig
from tests.histospec.test_index import draft

KEYS = [f"{n:032x}" for n in range(150)]


def rows_of(steps):
    """Two responses a prompt; which ones depends on the step."""
    rows = [
        {
            "prompt_key": key,
            "step": step,
            "prompt_token_ids": [7, 8, 9],
            "response_token_ids": [1, 2, 3, step, 5][: 5 - sample],
            "reward": float(sample),
        }
        for key, step in steps.items()
        for sample in range(2)
    ]
    return pa.Table.from_pylist(rows, INDEXED)


def test_rows_are_grouped_by_prompt():
    first, second = histories(rows_of({KEYS[0]: 3, KEYS[1]: 4}))
    assert (first.prompt_key, first.step, list(first.prompt_token_ids)) == (KEYS[0], 3, [7, 8, 9])
    assert [list(response) for response in second.responses] == [[1, 2, 3, 4, 5], [1, 2, 3, 4]]
    assert second.rewards == [0.0, 1.0]
    assert histories(rows_of({})) == []


@pytest.fixture
async def workers(ray_cluster, tmp_path):
    assert ray_cluster.is_initialized()
    trouble = []
    workers = HistoryWorkers(tmp_path / "history", DraftingConfig(), trouble.append)
    workers.trouble = trouble
    workers.start()
    yield workers
    await workers.shutdown()


@pytest.mark.engine
async def test_histories_come_back(workers, tmp_path):
    asked = []

    async def read(steps):
        asked.append(len(steps))
        return rows_of(steps)

    wanted = dict.fromkeys(KEYS, 2)
    workers.prepare(wanted, read)
    # What is being built in the background is waited for, not built twice.
    assert await workers.ensure(wanted, read) == len(KEYS)
    assert sum(asked) == len(KEYS)
    assert max(asked) <= 64
    path = index_path(tmp_path / "history", KEYS[9])
    assert draft(open_index(path, KEYS[9]), [1, 2, 3], 3) == [2, 5]

    (actor,) = workers._actors
    pid = await actor.handle.__ray_call__.remote(lambda _: os.getpid())
    os.kill(pid, signal.SIGKILL)
    path.unlink()
    damaged = index_path(tmp_path / "history", KEYS[8])
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    asked.clear()
    # The call that meets the death asks the restarted worker, which finds all files but the two.
    async with asyncio.timeout(120):
        assert await workers.ensure(wanted, read) == len(KEYS)
    assert sum(asked) == 2
    assert workers.trouble == []
    counts = await workers.counts()
    assert (counts.num_indexes, counts.num_built, counts.num_damaged) == (len(KEYS), 2, 1)
    assert await workers.ensure(dict.fromkeys(KEYS[:3], 5), read) == 3
    assert draft(open_index(index_path(tmp_path / "history", KEYS[0]), KEYS[0]), [1, 2, 3], 9) == [
        5,
        5,
    ]


@pytest.mark.engine
async def test_a_full_disk_costs_speed_only(ray_cluster, tmp_path):
    assert ray_cluster.is_initialized()
    trouble: list[str] = []
    workers = HistoryWorkers(tmp_path / "history", DraftingConfig(), trouble.append)
    workers.start()

    async def read(steps):
        return rows_of(steps)

    assert await workers.ensure({KEYS[0]: 1}, read) == 1
    # A directory where a file belongs: it cannot be replaced.
    index_path(tmp_path / "history", KEYS[1]).mkdir()
    (index_path(tmp_path / "history", KEYS[1]) / "in the way").touch()
    assert await workers.ensure({KEYS[0]: 1, KEYS[1]: 1}, read) == 1
    assert len(trouble) == 1
    assert KEYS[1] in trouble[0]
    await workers.shutdown()
