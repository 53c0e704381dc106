"""All processes that an engine leaves on its node are ended, and no others."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from refrain.engines.gpus import cleanup
from refrain.engines.gpus.cleanup import MARK, CleanupActor, Marked, wait_until_steady

TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) > 1:
    if os.fork():  # Its child keeps what it was started with, and has another parent.
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
        sys.exit()
time.sleep(60)
"""


def started(mark):
    """Start a process with this mark and return it. Leave two more behind, with other parents."""
    env = {**os.environ, MARK: mark}
    command = [sys.executable, "-c", TREE]
    parent = subprocess.Popen(command, env=env)
    subprocess.run([*command, "leave"], env=env, stdout=subprocess.DEVNULL, check=True)
    return parent


def marked(mark):
    return [
        process
        for process in psutil.process_iter()
        if cleanup._mark_of(process) == mark and process.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.fixture
def others():
    other = started("another engine")
    yield other
    for process in marked("another engine"):
        process.kill()
    other.wait()


def test_only_marked_processes_end(others):
    started("this one")
    assert len(marked("this one")) == 3
    CleanupActor().end(Marked("this one", "node", ()))
    assert marked("this one") == []
    assert len(marked("another engine")) == 3
    assert others.poll() is None


def test_process_that_does_not_end_is_named(monkeypatch):
    """A process that waits for a GPU inside the kernel cannot be killed."""
    parent = started("stuck")
    monkeypatch.setattr(cleanup, "END_S", 0.2)
    monkeypatch.setattr(psutil.Process, "kill", lambda _: None)
    with pytest.raises(RuntimeError, match=rf"still running after 0 s: .*\({parent.pid}\)"):
        CleanupActor().end(Marked("stuck", "node", ()))
    monkeypatch.undo()
    CleanupActor().end(Marked("stuck", "node", ()))
    parent.wait()


def test_memory_is_waited_for_while_it_falls(monkeypatch):
    monkeypatch.setattr(cleanup, "LOOK_S", 0.001)
    used = iter([9000, 8000, 500, 500, 0])
    wait_until_steady(lambda: next(used))
    assert next(used) == 0

    monkeypatch.setattr(cleanup, "END_S", 0.05)
    forever = iter(range(10**9, 0, -1))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="still being freed"):
        wait_until_steady(lambda: next(forever))
    assert time.monotonic() - began < 5
