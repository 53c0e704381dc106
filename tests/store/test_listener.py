"""The store of a live run serves its tables to other processes of the same user."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from refrain.engines.store import listener
from refrain.engines.store.listener import Needed, listen, live_snapshot
from refrain.engines.store.store import Store
from tests.conftest import REPOSITORY
from tests.store.test_archive import add_step

NOBODY = 65534
SERVES = """
import sys, time
from pathlib import Path
from refrain.engines.store.store import Store
from refrain.engines.store.listener import listen

directory = Path(sys.argv[1])
listen(directory, Store(directory / "refrain.duckdb").snapshot)
print("ready", flush=True)
time.sleep(600)
"""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def steps_of(run_dir: Path, timeout_s: float = 5.0) -> list[int] | None:
    """Return the steps that a live store has, or None when no store is live."""
    with live_snapshot(run_dir, timeout_s) as live:
        if live is None:
            return None
        (reader,) = live.read({"steps": Needed(("step",))})
        return sorted(reader.read_all()["step"].to_pylist())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    run_dir = tmp_path / ("long" * 40)
    run_dir.mkdir()
    with Store(run_dir / "refrain.duckdb") as store:
        for step in (1, 2):
            add_step(store, step)
        yield store
        all_served()


def all_served() -> None:
    """Wait until the store has served all its readers: it cannot be closed before."""
    for thread in threading.enumerate():
        if thread.name == listener.SERVING:
            thread.join(10.0)


def test_tables_are_of_one_moment(store: Store) -> None:
    run_dir = store.path.parent
    assert steps_of(run_dir) is None
    before = {*run_dir.iterdir()}
    listen(run_dir, store.snapshot)
    assert {*run_dir.iterdir()} == before, "a kill would leave such files behind"
    with live_snapshot(run_dir, 5.0) as live:
        assert live is not None
        assert live.columns["steps"]["report"] == "JSON"
        add_step(store, 3)
        (reader,) = live.read({"steps": Needed(("step",))})
        assert reader.read_all().num_rows == 2
        where = ((("step", ">=", 2),), (("split", "=", "validation"), ("step", "<", 9)))
        wanted = {"rewards": Needed(("reward", "step"), where), "plans": Needed(("step",))}
        tables = [reader.read_all() for reader in live.read(wanted)]
        assert [{*table["step"].to_pylist()} for table in tables] == [{2}, {1, 2}]
    assert steps_of(run_dir) == [1, 2, 3]


def test_no_sql_comes_to_a_live_store(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    listen(store.path.parent, store.snapshot)
    for needed in (
        Needed(("step FROM steps; DELETE FROM steps; --",)),
        Needed(("step",), ((("step", "= 1 OR 1 =", 1),),)),
        Needed(("step",), ((("step = 1; --", "=", 1),),)),
    ):
        with live_snapshot(store.path.parent, 5.0) as live:
            assert live is not None
            with pytest.raises((ValueError, OSError)):
                [reader.read_all() for reader in live.read({"steps": needed})]
    assert steps_of(store.path.parent) == [1, 2]
    assert "another version" in capfd.readouterr().out


def test_waiting_client_does_not_block_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = store.path.parent
    monkeypatch.setattr(listener, "_MAX_READERS", 2)
    listen(run_dir, store.snapshot)
    with live_snapshot(run_dir, 2.0) as slow:
        assert slow is not None
        assert steps_of(run_dir) == [1, 2]
        with live_snapshot(run_dir, 2.0), pytest.raises(ValueError, match="not answered"):
            steps_of(run_dir, 0.2)
        assert steps_of(run_dir, 30.0) == [1, 2], "the slow reader must free its place in time"


def test_a_process_that_was_killed_is_followed_by_another(tmp_path: Path) -> None:
    for _ in range(2):
        serving = subprocess.Popen(
            [sys.executable, "-c", SERVES, str(tmp_path)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert serving.stdout is not None
        assert serving.stdout.readline() == "ready\n"
        assert steps_of(tmp_path) == []
        os.kill(serving.pid, signal.SIGKILL)
        serving.wait(30)
        assert steps_of(tmp_path) is None


@contextmanager
def another_user(does: Callable[[], bytes]) -> Iterator[Callable[[], bytes]]:
    """Run this in a process of `nobody`. Yield a function that returns its result."""
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        theirs.sendall(does() or b"nothing")
        ours.close()
        theirs.recv(1)
        os._exit(0)
    theirs.close()
    with ours:
        ours.settimeout(30.0)
        yield lambda: ours.recv(2**20)
    os.waitpid(pid, 0)


def takes(addresses: list[str], said: bytes) -> bytes:
    """Bind these addresses, and send `said` to everyone that connects."""

    def answer(listening: socket.socket) -> None:
        while True:
            asking, _ = listening.accept()
            asking.sendall(said)

    for address in addresses:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address)
        listening.listen()
        threading.Thread(target=answer, args=(listening,), daemon=True).start()
    return b"taken"


@as_root
@pytest.mark.parametrize("num_taken", [1, listener.NUM_NAMES])
def test_a_stranger_cannot_answer_for_a_store(store: Store, num_taken: int) -> None:
    run_dir = store.path.parent
    names = listener._addresses(run_dir)[:num_taken]
    with another_user(lambda: takes(names, b'{"steps": {"step": "INTEGER"}}\n')) as result:
        assert result() == b"taken"
        assert steps_of(run_dir) is None
        if num_taken == listener.NUM_NAMES:
            with pytest.raises(OSError, match="8 names are taken"):
                listen(run_dir, store.snapshot)
        else:
            listen(run_dir, store.snapshot)
            assert steps_of(run_dir) == [1, 2]


@as_root
def test_unresponsive_stranger_does_not_block_clients(store: Store) -> None:
    def takes_and_fills() -> bytes:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(name)
        listening.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(name)
        kept.extend([listening, *waiting])
        return b"taken"

    kept: list[socket.socket] = []
    name = listener._addresses(store.path.parent)[0]
    with another_user(takes_and_fills) as result:
        assert result() == b"taken"
        listen(store.path.parent, store.snapshot)
        began_s = time.monotonic()
        assert steps_of(store.path.parent, 20.0) == [1, 2]
        assert time.monotonic() - began_s < 10.0


@as_root
def test_a_stranger_is_not_answered(store: Store) -> None:
    def asks() -> bytes:
        asking = socket.socket(socket.AF_UNIX)
        asking.connect(name)
        try:
            asking.sendall(b'5.0\n{"steps": {"columns": ["step"]}}\n')
            return asking.recv(2**16)
        except OSError:
            return b""

    name = listener._addresses(store.path.parent)[0]
    listen(store.path.parent, store.snapshot)
    with another_user(asks) as result:
        assert result() == b"nothing"


def test_a_store_of_another_user_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def user(_: socket.socket) -> int:
        return os.getuid() + (threading.current_thread().name == "sql")

    listen(store.path.parent, store.snapshot)
    monkeypatch.setattr(listener, "_user_of", user)
    with pytest.raises(ValueError, match="closed the connection"):
        steps_of(store.path.parent)
