"""SIGHUP, SIGINT and SIGTERM end a command in the same way. However a run ends, none of its
processes stay."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from refrain.flows.signals import SIGNALS
from refrain.tasks.run.run_dir import REF_FILE, RUN_MARK
from tests.conftest import REPOSITORY
from tests.flows.commands import with_default_signals

TIMEOUT_S = 60.0
FLOW = """
import asyncio, atexit, sys, time
import refrain.flows.signals
from refrain.flows.command import run_command

refrain.flows.signals.GRACE_S = float(sys.argv[2])
if sys.argv[3] == "exits slowly":
    atexit.register(time.sleep, 600)

async def flow():
    print("begun", flush=True)
    try:
        if sys.argv[3] == "blocked":
            time.sleep(600)
        await asyncio.sleep(600)
    finally:
        print("unwinding", flush=True)
        await asyncio.sleep(float(sys.argv[1]))
        print("unwound", flush=True)

run_command(lambda: refrain.flows.signals.run_interruptibly(flow()))
"""
PARENT = """
import asyncio, subprocess
from refrain.flows.command import run_command
from refrain.flows.signals import run_interruptibly

async def flow():
    child = subprocess.Popen(["sleep", "600"])
    print("begun", flush=True)
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0.2)
        print("its child has ended" if child.poll() is not None else "its child lives", flush=True)
        child.kill()
        raise RuntimeError("Ray has died")

run_command(lambda: run_interruptibly(flow()))
"""
COMMAND = """
import time
from refrain.flows.command import run_command

def command():
    try:
        print("begun", flush=True)
        while True:
            time.sleep(0.1)
    finally:
        print("unwound", flush=True)

run_command(command)
"""
UNHEARD = """
import asyncio, signal, threading
from refrain.flows.command import run_command
from refrain.flows.signals import run_interruptibly

async def flow():
    # The main thread waits on: the kernel interrupts the thread that it gives the signal to.
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    await asyncio.sleep(600)

run_command(lambda: run_interruptibly(flow()))
"""
TALKS = """
import sys, time
from pathlib import Path
from refrain.flows.command import run_command
from refrain.flows.signals import WhileRead

def command():
    sys.stdout = WhileRead(sys.stdout)
    for number in range(20):
        print("step", number, flush=True)
        time.sleep(0.05)
    Path(sys.argv[1]).write_text("done")

run_command(command)
"""
SAYS = "from refrain.flows.command import run_command; run_command(lambda: print('a table'))"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        given |= {"preexec_fn": with_default_signals, "text": True, "start_new_session": True}
        command = [sys.executable, "-c", code, *map(str, arguments)]
        started.append(subprocess.Popen(command, cwd=REPOSITORY, **given | options))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def until(output: IO[str] | None, text: str) -> None:
    assert output is not None
    for line in output:
        if text in line:
            return
    raise AssertionError(f"ended without {text!r}")


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("code", [FLOW, COMMAND], ids=["run", "command"])
def test_each_signal_unwinds(start: Any, code: str, number: signal.Signals) -> None:
    process = start(code, 0.1, 30, "awaits")
    until(process.stdout, "begun")
    process.send_signal(number)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "unwound" in output
    assert "interrupted; continue a run with --resume" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_the_second_ends_at_once(start: Any, number: signal.Signals) -> None:
    process = start(FLOW, 600, 600, "awaits")
    until(process.stdout, "begun")
    process.send_signal(number)
    until(process.stdout, "unwinding")
    process.send_signal(number)
    assert process.wait(TIMEOUT_S) == -number


def test_a_signal_that_interrupts_no_wait_is_handled(start: Any) -> None:
    output, _ = (process := start(UNHEARD)).communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "ending (SIGINT)" in output


def test_children_outlive_the_terminal_until_the_run_ends(start: Any) -> None:
    """A closed terminal sends SIGHUP to all processes of its group, also to the run's children."""
    process = start(PARENT)
    until(process.stdout, "begun")
    os.killpg(process.pid, signal.SIGHUP)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "its child lives" in output
    assert "error while ending: Ray has died" in output
    assert "Traceback" not in output


def test_the_second_ends_a_process_that_is_exiting(start: Any) -> None:
    """Prefect sends its last logs at exit, which may take long."""
    process = start(FLOW, 0.0, 600, "exits slowly")
    until(process.stdout, "begun")
    process.send_signal(signal.SIGINT)
    until(process.stdout, "interrupted")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (-signal.SIGINT, "")


@pytest.mark.parametrize("doing", ["awaits", "blocked", "exits slowly"])
def test_command_that_does_not_unwind_still_ends(start: Any, doing: str) -> None:
    process = start(FLOW, 0.0 if doing == "exits slowly" else 600, 0.5, doing)
    until(process.stdout, "begun")
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 130


def test_nohup_is_respected(start: Any) -> None:
    def as_nohup() -> None:
        with_default_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = start(FLOW, 0.1, 30, "awaits", preexec_fn=as_nohup)
    until(process.stdout, "begun")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 130


def test_a_closed_terminal_ends_a_run_without_a_traceback(start: Any, tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and every later write to the terminal fails."""
    ours, terminal = pty.openpty()

    def in_terminal() -> None:
        with_default_signals()
        os.close(os.open(os.ttyname(terminal), os.O_RDWR))  # Now it is the session's terminal.

    code = FLOW.replace('print("unwound", flush=True)', f'open({str(tmp_path / "end")!r}, "w")')
    errors = (tmp_path / "errors").open("w")
    process = start(
        code, 0.1, 30, "awaits", stdin=terminal, stdout=terminal, stderr=errors,
        preexec_fn=in_terminal,
    )  # fmt: skip
    os.close(terminal)
    said = b""
    while b"begun\r\n" not in said:
        said += os.read(ours, 1000)
    os.close(ours)
    assert process.wait(TIMEOUT_S) == 130
    assert (tmp_path / "end").exists()
    assert "Traceback" not in (tmp_path / "errors").read_text()


def test_run_outlives_the_reader_of_its_output(start: Any, tmp_path: Path) -> None:
    process = start(TALKS, tmp_path / "end", stderr=subprocess.PIPE)
    until(process.stdout, "step 1")
    process.stdout.close()
    assert process.wait(TIMEOUT_S) == 0
    assert (tmp_path / "end").read_text() == "done"
    assert process.stderr.read() == ""


HOLDS = """
import threading, time
import duckdb
from refrain.flows.command import run_command
from refrain.flows.signals import run_interruptibly

async def flow():
    threading.Thread(target=lambda: time.sleep(600), daemon=True).start()
    global store
    store = duckdb.connect()

if {ends}:
    run_command(lambda: run_interruptibly(flow()))
else:
    import asyncio; asyncio.run(flow())
"""


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_ends_without_a_list_of_leaks(start: Any, ends: bool) -> None:
    """A thread outlives the flow. The negative control does not use `run_command`: there DuckDB's
    bindings print a list of leaks."""
    process = start(HOLDS.format(ends=ends), stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert ("leaked" in errors) is not ends


def test_table_on_a_closed_pipe_is_no_error(start: Any) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start(SAYS, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode in (0, 141)  # Depends on when Python flushes its buffer.
    assert errors == ""


CLEANED = """
import os, subprocess, sys, time
from pathlib import Path
from refrain.flows.cleaner import Cleaner
from refrain.schemas.profile import ProfileConfig
from refrain.tasks.run.run_dir import REF_FILE, claim_run_dir, mark_processes

runs_dir = Path(sys.argv[1])
config = ProfileConfig(model=runs_dir, runs_dir=runs_dir, name="it", tp_degrees=[1])
mark_processes(config.run_dir)
cleaner = Cleaner([config.run_dir], runs_dir)
lock = claim_run_dir(config, resume=False)
(config.run_dir / REF_FILE).write_text("{}")
left = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("begun", left.pid, config.run_dir, flush=True)
if sys.argv[2] == "killed":
    time.sleep(600)
"""


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("end", ["killed", "by itself"])
def test_a_killed_runs_processes_are_ended_for_it(start: Any, tmp_path: Path, end: str) -> None:
    process = start(CLEANED, tmp_path, end, stderr=subprocess.DEVNULL)
    _, pid, run_dir = process.stdout.readline().split()
    left, ref = psutil.Process(int(pid)), Path(run_dir, REF_FILE)
    deadline = time.monotonic() + TIMEOUT_S
    # Linux shows the environment a moment after the process has started.
    while RUN_MARK not in (environment := left.environ()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert environment[RUN_MARK] == run_dir
    process.kill() if end == "killed" else process.wait(TIMEOUT_S)
    deadline = time.monotonic() + (TIMEOUT_S if end == "killed" else 0.0)
    try:
        while time.monotonic() < deadline and not (ended(left) and not ref.exists()):
            time.sleep(0.1)
        # The cleaner acts only for a run that was killed.
        assert (ended(left), ref.exists()) == ((True, False) if end == "killed" else (False, True))
    finally:
        with contextlib.suppress(psutil.Error):
            left.kill()
