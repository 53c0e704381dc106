"""Faults on stand-ins: processes that sleep, write or tell the time, marked as a run's."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos.faults import Fault, Moment, RunMode, Strike, Target
from benchmarks.chaos.reading import SHARED_MEMORY, held_by_nobody
from benchmarks.chaos.small_run import CHECKOUT, SmallRun, small_run
from benchmarks.chaos.strikes import _apply, _find, _left_running

STRIKE = Strike(
    number=0, target=Target.STORE, fault=Fault.KILL, moment=Moment.ROLLOUT, mode=RunMode.SYNC
)
WRITES = """
import sys, time
file = open(sys.argv[2], "wb", buffering=0)
print("ready", flush=True)
sys.stdin.readline()
try:
    file.write(bytes(2**20))
    file.write(b"more")
except OSError as error:
    print(error, flush=True)
"""
TELLS = "import time; print('ready', flush=True); input(); print(time.time(), flush=True)"
SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    with small_run(tmp_path / "it", RunMode.SYNC, STRIKE) as run:
        yield run


def process(run: SmallRun, code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process of the run, titled as its store."""
    environment = os.environ | {"REFRAIN_RUN_DIR": str(run.run_dir)}
    environment |= {"REFRAIN_CHAOS_CLOCK": str(run.clock)}
    environment["PYTHONPATH"] = str(CHECKOUT / "benchmarks" / "chaos" / "clock")
    made = subprocess.Popen(
        [sys.executable, "-c", code, "ray::StoreActor", *arguments],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert made.stdout is not None
    assert made.stdout.readline() == "ready\n"
    return made


def struck(run: SmallRun, fault: Fault) -> list[psutil.Process]:
    strike = STRIKE.model_copy(update={"fault": fault})
    targets = _find(run, strike)
    _apply(run, strike, targets)
    return targets


def test_a_process_of_the_run_is_found_and_killed(run: SmallRun) -> None:
    assert _find(run, STRIKE) == []
    store = process(run, SLEEPS)
    assert [found.pid for found in run.processes()] == [store.pid]
    assert run.find(Target.SCORER) == []
    (target,) = struck(run, Fault.KILL)
    assert target.pid == store.pid
    assert store.wait(30) == -9
    assert _left_running(run) == []


def test_a_process_that_is_left_is_named(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.chaos.strikes.GONE_S", 0.5)
    store = process(run, SLEEPS)
    (named,) = _left_running(run)
    assert named.startswith(f"{store.pid} ")
    run.end()
    assert store.wait(30) == -9


def test_a_stopped_process_goes_on(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.chaos.strikes.STOPPED_S", 1.0)
    monkeypatch.setattr(SmallRun, "running", True)
    store = process(run, SLEEPS)
    began = time.monotonic()
    struck(run, Fault.STOP)
    assert time.monotonic() - began >= 1.0
    assert psutil.Process(store.pid).status() != psutil.STATUS_STOPPED


def test_a_disk_is_full_for_one_process(run: SmallRun, tmp_path: Path) -> None:
    store = process(run, WRITES, str(tmp_path / "file"))
    struck(run, Fault.DISK_FULL)
    said, _ = store.communicate("\n", timeout=30)
    assert "File too large" in said
    (tmp_path / "mine").write_bytes(bytes(2**20))


def test_the_clock_of_all_processes_goes_back(run: SmallRun) -> None:
    store = process(run, TELLS)
    strike = STRIKE.model_copy(update={"fault": Fault.CLOCK})
    _apply(run, strike, [])
    said, _ = store.communicate("\n", timeout=30)
    assert 3500.0 < time.time() - float(said) < 3700.0


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="has no /dev/shm")
def test_a_file_in_shared_memory_that_nobody_holds_is_found() -> None:
    path = SHARED_MEMORY / f"chaos-test-{os.getpid()}"
    with path.open("wb") as file:
        file.write(b"weights")
        assert held_by_nobody({path.name}) == set()
    assert held_by_nobody({path.name}) == {path.name}
    path.unlink()


def test_a_moment_is_a_line_of_its_own(run: SmallRun) -> None:
    run.output.write_text("train step 2: rolling out\n")
    assert not run._reached(Moment.CHECKPOINTING)
    run.output.write_text("train step 2: rolling out\nstep 2: saving\n")
    assert run._reached(Moment.CHECKPOINTING)
    assert run._reached(Moment.PUBLICATION)
    assert not run._reached(Moment.SCORING)
    assert not run._reached(Moment.MIGRATION)
