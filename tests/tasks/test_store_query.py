"""Each query has a process of its own, so that it cannot harm the run or the caller."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from refrain.engines.store.listener import listen
from refrain.engines.store.store import Store
from refrain.tasks.run import store_query
from refrain.tasks.run.run_dir import STORE_FILE
from refrain.tasks.run.store_query import query_run
from tests.store.test_archive import add_step
from tests.store.test_listener import all_served


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with Store(tmp_path / STORE_FILE) as store:
        add_step(store, 1)
    return tmp_path


def test_a_query_ends_in_time(run_dir: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(ValueError, match=r"no answer within 0\.5 s"):
        query_run(
            run_dir, "SELECT sum(a.range * b.range) FROM range(1e7::INT) a, range(1e7::INT) b", 0.5
        )
    # The plan doubles with each step: DuckDB runs out of time before it executes the plan.
    steps = (
        f"c{i + 1} AS NOT MATERIALIZED (SELECT a.x + b.x AS x FROM c{i} a, c{i} b)"
        for i in range(25)
    )
    with pytest.raises(ValueError, match=r"no answer within 0\.5 s"):
        query_run(run_dir, f"WITH c0 AS (SELECT 1 AS x), {', '.join(steps)} FROM c25", 0.5)
    assert time.monotonic() - began_s < 15.0
    assert query_run(run_dir, "SELECT 1", 30.0).num_rows == 1


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, 0.0, 1e30])
def test_an_absurd_time_is_refused(run_dir: Path, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="the timeout must be above 0 and at most 86400 s"):
        query_run(run_dir, "SELECT 1", timeout_s)


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("SELECT '\udcff'", "not UTF-8 at character 9"),
        ("SELECT error(chr(27) || '[2J' || chr(155))", r"\\x1b\[2J\\x9b"),
        ("SELECT error(repeat('x', 1000000))", "x{9000}"),
        ("(" * 20_000, "."),
    ],
    ids=["bytes", "escapes", "long error", "deep"],
)
def test_an_odd_query_is_refused_in_a_sentence(run_dir: Path, query: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refusal:
        query_run(run_dir, query, 20.0)
    assert len(str(refusal.value)) < 12_000
    assert str(refusal.value).replace("\n", "").isprintable()


def test_a_query_cannot_take_the_memory_of_a_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is 1 GiB here, so that the query reaches it soon."""
    monkeypatch.setattr(
        store_query,
        "_COMMAND",
        (
            *store_query._COMMAND[:2],
            "-c",
            "import os, sys\n"
            "from refrain.engines.store import reader, sandbox\n"
            "sandbox.MEMORY_BYTES = 2**30\n"
            "code = reader.main()\n"
            "sys.stdout.flush(); sys.stderr.flush(); os._exit(code)",
        ),
    )
    with Store(run_dir / STORE_FILE) as store:
        listen(run_dir, store.snapshot)
        used = psutil.Process().memory_info().rss
        with pytest.raises(ValueError, match="needs more than 4GB of memory"):
            query_run(run_dir, "SELECT len(list(range)) FROM range(700000000)", 60.0)
        assert psutil.Process().memory_info().rss - used < 2**28
        add_step(store, 2)
        steps = query_run(run_dir, "SELECT step FROM steps ORDER BY step", 60.0)
        assert steps["step"].to_pylist() == [1, 2]
        all_served()


def test_a_process_that_is_killed_is_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = subprocess.run

    def kill(command: tuple[str, ...], **options: object) -> subprocess.CompletedProcess:
        dies = f"import os; os.kill(os.getpid(), {signal.SIGKILL:d})"
        return started((command[0], "-c", dies), **options)

    monkeypatch.setattr(subprocess, "run", kill)
    with pytest.raises(RuntimeError, match=r"died \(signal 9\)\. It may use 6 GiB of memory"):
        query_run(run_dir, "SELECT 1", 20.0)


def test_no_secret_is_given_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    assert "HF_TOKEN" not in store_query._environment()
    assert store_query._environment()["PATH"] == os.environ["PATH"]
