"""The history worker of a node uses few cores, and sends its files to nodes that do not share its
directory."""

import asyncio
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace

import numpy as np
import pytest

from refrain.engines.actors import ActorGone
from refrain.engines.histospec import worker as history_worker
from refrain.engines.histospec.index import build_index
from refrain.engines.histospec.index_file import index_path, shared_dir
from refrain.engines.histospec.shared import SharedReader
from refrain.engines.histospec.worker import HistoryWorker, keep_to, room_for_indexes
from refrain.engines.histospec.workers import HistoryWorkers
from refrain.schemas.drafting import DraftingConfig
from tests.histospec.test_workers import rows_of

KEYS = [f"{n:08x}" for n in range(40)]


def aside(call, *args):
    """Make the call in a new thread: a worker changes the cores and priority of its thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call, *args).result()


@pytest.mark.parametrize("num_cpus", [1, 1000, None])
def test_worker_uses_few_cores_at_low_priority(num_cpus):
    def kept():
        num_threads = keep_to(num_cpus)
        cores = os.sched_getaffinity(threading.get_native_id())
        # Threads that it starts inherit its cores.
        started = aside(os.sched_getaffinity, 0)
        return num_threads, cores, started, os.getpriority(os.PRIO_PROCESS, 0)

    cores = sorted(os.sched_getaffinity(0))
    before = os.getpriority(os.PRIO_PROCESS, 0)
    num_threads, kept_to, started, niceness = aside(kept)
    expected = min(num_cpus, len(cores)) if num_cpus else max(1, len(cores) // 4)
    assert num_threads == expected
    assert kept_to == started == set(cores[-expected:])
    assert niceness == min(19, before + 10)
    assert os.sched_getaffinity(0) == set(cores)


def build_on(num_cpus, ready, stop):
    """Build indexes as a worker does until `stop` is set."""
    keep_to(num_cpus)
    responses = list(np.random.default_rng(0).integers(0, 1000, (8, 4000)))
    while not stop.is_set():
        build_index([], responses, [1.0] * len(responses))
        ready.set()


def test_history_builds_leave_engines_most_of_a_core():
    """The worker's niceness gives the engine nine tenths. At equal niceness it would get half."""
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    worker = context.Process(target=build_on, args=(1, ready, stop))
    worker.start()

    def built_s():
        return int(Path(f"/proc/{worker.pid}/schedstat").read_text().split()[0]) / 1e9

    def engine_s(seconds=0.6):
        """Return the worker's CPU time per second of an engine on the same core."""
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
        began_s, before_s = time.thread_time(), built_s()
        while time.thread_time() - began_s < seconds:
            pass
        return (built_s() - before_s) / seconds

    try:
        assert ready.wait(120)
        assert 0.0 < aside(engine_s) < 0.25
    finally:
        stop.set()
        worker.join(60)
        worker.kill()


class Actor:
    """A handle to a worker in this process. Counts the files that the worker gives to others."""

    def __init__(self, worker: HistoryWorker, name: str) -> None:
        self.worker, self.name = worker, name
        self.num_files = 0
        self.fails: set[str] = set()

    async def call(self, method, *args, timeout_s):
        assert timeout_s <= 120
        await asyncio.sleep(0)
        if method in self.fails:
            raise ActorGone(self.name, "is dead")
        return getattr(self.worker, method)(*args)

    async def call_with_reference(self, method, *args, timeout_s):
        num_names, files = await self.call(method, *args, timeout_s=timeout_s)
        self.num_files += len(files)
        return num_names, files

    def kill(self): ...


def workers_of(*directories, **options):
    config, trouble = DraftingConfig(**options), []
    made = partial(HistoryWorker, config=config, num_shares=len(directories), epoch_steps=2)
    actors = [
        Actor(aside(partial(made, directory, share=share)), f"history worker {share}")
        for share, directory in enumerate(directories)
    ]
    workers = HistoryWorkers(directories[0], config, trouble.append)
    workers._take(actors)
    workers.trouble = trouble
    return workers


async def read(steps):
    return rows_of(steps)


def files_of(directory):
    paths = [*directory.glob("*.index"), *shared_dir(directory).glob("*.index")]
    return {path.name: path.read_bytes() for path in paths}


async def test_every_node_has_every_file(tmp_path, monkeypatch):
    monkeypatch.setattr(history_worker, "PART_BYTES", 2000)
    nodes = [tmp_path / name for name in "abc"]
    workers = workers_of(*nodes)
    wanted = dict.fromkeys(KEYS, 1)
    assert await workers.ensure(wanted, read) == len(KEYS)
    first, *others = map(files_of, nodes)
    assert {f"{key}.index" for key in KEYS} < first.keys()
    assert [it == first for it in others] == [True, True]
    assert sum(actor.num_files for actor in workers._actors) == len(first)
    assert workers.counts().num_copied == 2 * len(KEYS)
    assert workers.counts().num_indexes == 3 * len(KEYS)
    for node in nodes:
        indexes, num_refused = SharedReader(node).read()
        assert (len(indexes), num_refused) == (3, 0)
    assert workers.trouble == []


async def test_existing_files_are_not_copied_again(tmp_path):
    nodes = [tmp_path / name for name in "ab"]
    workers = workers_of(*nodes)
    await workers.ensure(dict.fromkeys(KEYS, 1), read)
    for actor in workers._actors:
        actor.num_files = 0
    await workers.ensure(dict.fromkeys(KEYS, 1), read)
    assert [actor.num_files for actor in workers._actors] == [0, 0]
    index_path(nodes[0], KEYS[1]).unlink()
    assert int(KEYS[1], 16) % 2 == 1, "the key must belong to the other node"
    await workers.ensure(dict.fromkeys(KEYS, 1), read)
    assert [actor.num_files for actor in workers._actors] == [0, 1]
    await workers.ensure({KEYS[0]: 2, KEYS[1]: 2}, read)
    assert files_of(nodes[0]) == files_of(nodes[1])


async def test_nodes_that_share_a_directory_copy_nothing(tmp_path):
    workers = workers_of(tmp_path / "shared", tmp_path / "shared", tmp_path / "own")
    await workers.ensure(dict.fromkeys(KEYS, 1), read)
    assert files_of(tmp_path / "shared") == files_of(tmp_path / "own")
    shares = [sum(int(key, 16) % 3 == share for key in KEYS) for share in range(3)]
    # Each worker gives its own indexes and one shared index: once to the separate node, and once
    # from there to the shared directory.
    assert [actor.num_files for actor in workers._actors] == [num + 1 for num in shares]
    assert workers.counts().num_copied == len(KEYS)
    # A worker does not count files in its directory that another worker owns.
    assert workers.counts().num_indexes == 2 * len(KEYS)
    together = workers_of(tmp_path / "b", tmp_path / "b")
    await together.ensure(dict.fromkeys(KEYS, 1), read)
    assert [actor.num_files for actor in together._actors] == [0, 0]
    assert (together.counts().num_copied, together.counts().num_indexes) == (0, len(KEYS))


async def test_marks_of_an_earlier_run_mean_nothing(tmp_path):
    """Both directories still hold the marks of an earlier run, as after copying them whole."""
    nodes = [tmp_path / name for name in "ab"]
    for node in nodes:
        await workers_of(node, node).ensure({KEYS[0]: 1}, read)
    workers = workers_of(*nodes)
    await workers.ensure(dict.fromkeys(KEYS, 2), read)
    assert {f"{key}.index" for key in KEYS} <= files_of(nodes[0]).keys()
    assert workers.counts().num_copied == len(KEYS)


async def test_failed_node_loses_only_its_copies(tmp_path):
    nodes = [tmp_path / name for name in "abc"]
    workers = workers_of(*nodes)
    workers._actors[1].fails = {"take"}
    assert await workers.ensure(dict.fromkeys(KEYS, 1), read) == len(KEYS)
    assert files_of(nodes[0]) == files_of(nodes[2])
    assert "not copied to all nodes: history worker 1 is dead" in workers.trouble[0]
    workers._actors[1].fails = set()
    await workers.ensure(dict.fromkeys(KEYS, 1), read)
    assert files_of(nodes[0]) == files_of(nodes[1])


async def test_a_node_that_lost_everything_gets_it_back(tmp_path):
    nodes = [tmp_path / name for name in "ab"]
    workers = workers_of(*nodes)
    await workers.ensure(dict.fromkeys(KEYS, 1), read)
    rmtree(nodes[1])
    await workers.ensure(dict.fromkeys(KEYS, 1), read)
    assert {f"{key}.index" for key in KEYS} <= files_of(nodes[1]).keys()


async def test_copies_stay_within_the_room(tmp_path):
    nodes = [tmp_path / name for name in "ab"]
    await workers_of(*nodes).ensure(dict.fromkeys(KEYS, 1), read)
    size = index_path(nodes[0], KEYS[0]).stat().st_size
    small = workers_of(tmp_path / "c", tmp_path / "d", max_index_bytes=len(KEYS) * size // 2)
    await small.ensure(dict.fromkeys(KEYS, 1), read)
    for node in (tmp_path / "c", tmp_path / "d"):
        held = sum(path.stat().st_size for path in node.glob("*.index*"))
        assert held <= len(KEYS) * size // 2


def test_indexes_take_half_of_a_small_disk(tmp_path, monkeypatch):
    config, looked_at = DraftingConfig(max_index_bytes=1000), []

    def disk_of(size: int) -> None:
        monkeypatch.setattr(
            history_worker,
            "disk_usage",
            lambda p: looked_at.append(p) or SimpleNamespace(total=size),
        )

    for size, expected in ((1000, 500), (10**6, 1000)):
        disk_of(size)
        assert room_for_indexes(tmp_path / "not" / "yet", config) == expected
    assert looked_at == [tmp_path, tmp_path]


async def test_only_files_of_an_earlier_run_are_deleted(tmp_path):
    await workers_of(tmp_path).ensure(dict.fromkeys(KEYS, 1), read)
    (tmp_path / "thesis.tex").touch()
    make = partial(HistoryWorker, tmp_path, DraftingConfig(), 0, 1, 2)
    aside(make, "")
    assert files_of(tmp_path)
    worker = aside(make, "begun")
    assert files_of(tmp_path) == {}
    assert worker.look_up({KEYS[0]: 1})[0] == [KEYS[0]]
    worker.add_rows(rows_of({KEYS[0]: 1}))
    # Ray restarts an actor with the same arguments.
    assert aside(make, "begun").look_up({KEYS[0]: 1})[0] == []
    assert (tmp_path / "thesis.tex").exists()
