"""A live run's store answers other processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from engines.store import listener
from engines.store.listener import ask_live, listen
from tests.conftest import REPOSITORY

SERVES = """
import sys, time
from pathlib import Path
from engines.store.store import Store
from engines.store.listener import listen

directory = Path(sys.argv[1])
listen(directory, Store(directory / "refrain.duckdb").ask)
print("ready", flush=True)
time.sleep(600)
"""


def numbers(query: str, timeout_s: float) -> pa.Table:
    if query == "no":
        raise ValueError(f"refused, within {timeout_s:g} s")
    if query == "wait":
        time.sleep(timeout_s)
    return pa.table({"number": range(int(query) if query.isdigit() else 0)})


def test_whoever_asks_is_answered(tmp_path: Path) -> None:
    run_dir = tmp_path / ("long" * 40)
    run_dir.mkdir()
    assert ask_live(run_dir, "1", 1.0) is None
    listen(run_dir, numbers)
    assert not [*run_dir.iterdir()], "nothing is left when it is killed"
    with ThreadPoolExecutor(4) as pool:
        tables = pool.map(lambda n: ask_live(run_dir, str(n), 5.0), [0, 3, 100_000, 5])
        assert [table.num_rows for table in tables if table is not None] == [0, 3, 100_000, 5]
    with pytest.raises(ValueError, match="refused, within 7 s"):
        ask_live(run_dir, "no", 7.0)


def test_one_that_waits_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen(tmp_path, numbers)
    slow = threading.Thread(target=ask_live, args=(tmp_path, "wait", 1.0))
    slow.start()
    began_s = time.monotonic()
    assert ask_live(tmp_path, "2", 5.0) is not None
    assert time.monotonic() - began_s < 0.9
    slow.join()
    monkeypatch.setattr(listener, "ANSWER_S", -0.5)
    with pytest.raises(ValueError, match="has not answered"):
        ask_live(tmp_path, "wait", 1.0)


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
        table = ask_live(tmp_path, "SELECT count(*) AS num FROM rollouts", 30.0)
        assert table is not None
        assert table["num"].to_pylist() == [0]
        with pytest.raises(ValueError, match="one query that reads"):
            ask_live(tmp_path, "DELETE FROM rollouts", 30.0)
        os.kill(serving.pid, signal.SIGKILL)
        serving.wait(30)
        assert ask_live(tmp_path, "SELECT 1", 1.0) is None


def test_another_user_is_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listen(tmp_path, numbers)
    monkeypatch.setattr(listener, "_user_of", lambda _: os.getuid() + 1)
    with pytest.raises(ValueError, match="closed"):
        ask_live(tmp_path, "1", 5.0)
