"""History workers on Ray: histories come back after deaths, hangs and lost or damaged files."""

import asyncio
import os
import signal

import pyarrow as pa
import pytest

from refrain.engines.actors import ActorGone, NoAnswer
from refrain.engines.histospec import workers as history_workers
from refrain.engines.histospec.index_file import index_path, open_index
from refrain.engines.histospec.worker import Offer, histories
from refrain.engines.histospec.workers import HistoryWorkers
from refrain.engines.store.tables import INDEXED
from refrain.schemas.counts import LibraryCounts
from refrain.schemas.drafting import DraftingConfig
from tests.histospec.test_index import draft

KEYS = [f"{n:032x}" for n in range(150)]


def rows_of(steps):
    """Return two responses per prompt. Their tokens depend on the step."""
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


def test_histories_have_the_turns_of_each_response():
    rows = rows_of({KEYS[0]: 4}).to_pylist()
    observed = [len(row["response_token_ids"]) - 3 for row in rows]
    for row, num in zip(rows, observed, strict=True):
        row["turns"] = [{"num_sampled": 1, "num_observed": num}, {"num_sampled": 2}]
    (history,) = histories(pa.Table.from_pylist(rows, INDEXED))
    (plain,) = histories(rows_of({KEYS[0]: 4}))
    assert list(map(list, history.responses)) == list(map(list, plain.responses))
    assert history.turns == [[(1, num), (2, 0)] for num in observed]
    assert plain.turns == [[], []]


class Worker:
    """A fake handle to a worker. `fails`: the error that its calls raise."""

    name = "history worker"

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.num_calls = self.num_restarts = 0

    async def call(self, method, *_, timeout_s):
        assert timeout_s <= 120
        self.num_calls += 1
        if self.fails:
            raise self.fails
        return {
            "look_up": ([], LibraryCounts(num_built=1)),
            "offer": Offer("", ""),
            "sees": {0, 1},
        }[method]

    def restart(self):
        self.num_restarts += 1
        self.fails = None

    def kill(self): ...


@pytest.fixture
def held(tmp_path):
    trouble: list[str] = []
    held = HistoryWorkers(tmp_path, DraftingConfig(), trouble.append)
    held._take([Worker(), Worker()])
    held.trouble = trouble
    return held


def no_rows(_):
    raise AssertionError("read rows although no history is missing")


async def test_hung_worker_restarts_without_delaying_others(held):
    hung, other = held._actors
    hung.fails = NoAnswer("history worker 0", "gave no answer")
    assert await held.ensure({KEYS[0]: 1, f"{1:08x}": 1}, no_rows) == 1
    assert (hung.num_restarts, other.num_restarts) == (1, 0)
    assert "the worker is restarted" in held.trouble[0]
    assert await held.ensure({KEYS[0]: 1, f"{1:08x}": 1}, no_rows) == 2
    async with held._locks[0], asyncio.timeout(5):
        # Counts do not wait for a busy worker: they are the last ones that it reported.
        assert held.counts().num_built == 2


async def test_a_worker_that_does_not_come_back_is_given_up(held, monkeypatch):
    monkeypatch.setattr(history_workers, "RESTART_S", 0.02)
    monkeypatch.setattr(history_workers, "_RETRY_S", 0.01)
    held._actors[0].fails = ActorGone("history worker 0", "is dead")
    assert await held.ensure({KEYS[0]: 1}, no_rows) == 0
    num_calls = held._actors[0].num_calls
    assert num_calls > 1
    assert await held.ensure({KEYS[0]: 1}, no_rows) == 0
    assert held._actors[0].num_calls == num_calls
    assert len(held.trouble) == 1


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
    # `ensure` waits for histories that are being built. It does not build them again.
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
    # The call that finds the worker dead asks the restarted one, which finds all but two files.
    async with asyncio.timeout(120):
        assert await workers.ensure(wanted, read) == len(KEYS)
    assert sum(asked) == 2
    assert workers.trouble == []
    counts = workers.counts()
    assert (counts.num_indexes, counts.num_built, counts.num_damaged) == (len(KEYS), 2, 1)
    assert await workers.ensure(dict.fromkeys(KEYS[:3], 5), read) == 3
    assert draft(open_index(index_path(tmp_path / "history", KEYS[0]), KEYS[0]), [1, 2, 3], 9) == [
        5,
        5,
    ]


@pytest.mark.engine
async def test_a_worker_that_was_stopped_is_replaced(workers, monkeypatch):
    async def read(steps):
        return rows_of(steps)

    assert await workers.ensure({KEYS[0]: 1}, read) == 1
    (actor,) = workers._actors
    pid = await actor.handle.__ray_call__.remote(lambda _: os.getpid())
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(history_workers, "ANSWER_S", 2.0)
    assert await workers.ensure({KEYS[1]: 1}, read) == 0
    monkeypatch.undo()
    async with asyncio.timeout(120):
        assert await workers.ensure(dict.fromkeys(KEYS[:2], 1), read) == 2
    assert await actor.handle.__ray_call__.remote(lambda _: os.getpid()) != pid


@pytest.mark.engine
async def test_a_full_disk_costs_speed_only(ray_cluster, tmp_path):
    assert ray_cluster.is_initialized()
    trouble: list[str] = []
    workers = HistoryWorkers(tmp_path / "history", DraftingConfig(), trouble.append)
    workers.start()

    async def read(steps):
        return rows_of(steps)

    assert await workers.ensure({KEYS[0]: 1}, read) == 1
    # A directory where the file belongs cannot be replaced.
    index_path(tmp_path / "history", KEYS[1]).mkdir()
    (index_path(tmp_path / "history", KEYS[1]) / "in the way").touch()
    assert await workers.ensure({KEYS[0]: 1, KEYS[1]: 1}, read) == 1
    assert len(trouble) == 1
    assert KEYS[1] in trouble[0]
    await workers.shutdown()
