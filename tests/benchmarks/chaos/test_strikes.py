"""Faults strike small processes that stand in for those of a run."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from refrain.benchmarks.chaos.faults import Fault, Moment, RunMode, Strike, Target
from refrain.benchmarks.chaos.run_traces import SHARED_MEMORY, described, held_by_nobody
from refrain.benchmarks.chaos.small_run import CHECKOUT, SmallRun, small_run
from refrain.benchmarks.chaos.strikes import _apply, _find, _left_running, see_through

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
GROWS = """
import time
print("ready", flush=True)
input()
kept = []
while len(kept) < 1000:
    kept.append(bytearray(b"x" * 2**18))
    time.sleep(0.01)
time.sleep(600)
"""
HOLDS = """
import sys, time
file = open(sys.argv[2], "wb")
print("ready", flush=True)
time.sleep(600)
"""
SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    with small_run(tmp_path / "it", RunMode.SYNC, [STRIKE]) as run:
        yield run


def process(run: SmallRun, code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a process that belongs to the run and has the title of its store."""
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
    monkeypatch.setattr("refrain.benchmarks.chaos.strikes.GONE_S", 0.5)
    store = process(run, SLEEPS)
    (named,) = _left_running(run)
    assert named.startswith(f"{store.pid} ")
    run.end()
    assert store.wait(30) == -9


def test_stopped_process_resumes(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refrain.benchmarks.chaos.strikes.STOPPED_S", 1.0)
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
def test_abandoned_shared_memory_file_is_found() -> None:
    path = SHARED_MEMORY / f"chaos-test-{os.getpid()}"
    with path.open("wb") as file:
        file.write(b"weights")
        assert held_by_nobody({path.name}) == set()
    assert held_by_nobody({path.name}) == {path.name}
    path.unlink()
    assert held_by_nobody({path.name}) == set()


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="has no /dev/shm")
def test_shared_memory_of_other_processes_is_ignored(run: SmallRun) -> None:
    """Both leave a file while the run goes on, and both names look like those of a run."""
    ours, theirs = (SHARED_MEMORY / f"refrain-{name}-{os.getpid()}" for name in ("ours", "theirs"))
    try:
        with theirs.open("wb"):
            own = process(run, HOLDS, str(ours))
            deadline = time.monotonic() + 30.0
            while not run.shared and time.monotonic() < deadline:
                time.sleep(0.1)
            own.kill()
            own.wait(30)
        assert theirs.exists()
        assert held_by_nobody(run.shared) == {ours.name}
    finally:
        ours.unlink(missing_ok=True)
        theirs.unlink(missing_ok=True)


def test_a_process_without_memory_is_killed(run: SmallRun) -> None:
    """The kernel kills it if this user may make a cgroup. Otherwise the bench does."""
    store = process(run, GROWS)
    assert store.stdin is not None
    store.stdin.write("\n")
    store.stdin.flush()
    strike = STRIKE.model_copy(update={"fault": Fault.MEMORY})
    how = _apply(run, strike, _find(run, strike))
    assert store.wait(30) == -9
    assert how in ("by the kernel, at the limit of a cgroup", "by SIGKILL")


def test_remaining_files_are_described(tmp_path: Path) -> None:
    (tmp_path / "left").mkdir()
    assert described(tmp_path / "left") == "left"
    (tmp_path / "left" / "weights").touch()
    assert described(tmp_path / "left") == "left (weights)"
    assert described(tmp_path / "left" / "weights") == "weights"


def test_a_moment_is_a_line_of_its_own(run: SmallRun) -> None:
    run.output.write_text("train step 2: rolling out\n")
    assert not run._reached(Moment.CHECKPOINTING, 2)
    run.output.write_text("train step 2: rolling out\nstep 2: saving\n")
    assert run._reached(Moment.CHECKPOINTING, 2)
    assert run._reached(Moment.PUBLICATION, 2)
    assert not run._reached(Moment.SCORING, 2)
    assert not run._reached(Moment.MIGRATION, 2)


def test_moment_of_a_step_may_come_later(
    run: SmallRun,
) -> None:
    run.output.write_text("train step 3: rolling out\n")
    assert run._reached(Moment.PUBLICATION, 2)
    assert not run._reached(Moment.PUBLICATION, 4)
    run.look_from_here()
    assert not run._reached(Moment.PUBLICATION, 2)
    with run.output.open("a") as output:
        output.write("train step 4: rolling out\n")
    assert run._reached(Moment.PUBLICATION, 2)


class EndingRun:
    """A run whose driver ends with these exit statuses in turn. None: it does not end in time."""

    def __init__(self, *ends: int | None, said: str = "go on by --resume") -> None:
        self.ends, self.num_starts, self._said = list(ends), 1, said

    def wait_for(self, *_: object) -> bool:
        return not self.ends

    def wait(self, _: float) -> int | None:
        return self.ends.pop(0) if self.ends else -9

    def start(self, **_: bool) -> None:
        self.num_starts += 1

    def said(self) -> str:
        return self._said

    def find(self, _: Target) -> list[psutil.Process]:
        self.ends.insert(0, -9)  # `see_through` kills the driver and waits for it.
        return []


@pytest.mark.parametrize(
    ("ends", "until", "complaint", "num_starts"),
    [
        ((0,), None, [], 1),
        ((-9, 1, 0), None, [], 3),
        ((-9,), (Moment.SCORING, 3), [], 2),
        ((0,), (Moment.SCORING, 3), [], 1),
        ((None, 0), None, ["no end within"], 2),
        ((1, 1, 1, 1), None, ["not finished after"], 4),
    ],
)
def test_a_run_is_seen_through(
    ends: tuple[int | None, ...],
    until: tuple[Moment, int] | None,
    complaint: list[str],
    num_starts: int,
) -> None:
    run = EndingRun(*ends)
    seen, found = see_through(run, until)  # ty: ignore[invalid-argument-type]
    assert seen == list(ends)
    assert [one[: len(said)] for one, said in zip(found, complaint, strict=True)] == complaint
    assert run.num_starts == num_starts


def test_end_without_advice_is_reported() -> None:
    run = EndingRun(1, 0, said="Traceback")
    assert see_through(run, None) == ([1, 0], ["ended without advice"])  # ty: ignore[invalid-argument-type]
