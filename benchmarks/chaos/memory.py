"""A process that runs out of memory: the kernel kills it at the limit of a cgroup of its own."""

import os
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
LIMIT_BYTES = 2**20
"""Less than any process takes: the next page that it touches is one too many."""
KILL_S = 60.0
"""Longest time until it touches one."""


def run_out_of_memory(process: psutil.Process) -> str:
    """Returns how it was killed: where this user may make no cgroup, by SIGKILL as the kernel
    would send it."""
    with suppress(OSError), _cgroup(f"refrain-chaos-{process.pid}") as group:
        (group / "cgroup.procs").write_text(str(process.pid))
        deadline = time.monotonic() + KILL_S
        while time.monotonic() < deadline and process.is_running() and not _num_killed(group):
            time.sleep(0.1)
        if _num_killed(group):
            return "by the kernel, at the limit of a cgroup"
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)
    return "by SIGKILL"


@contextmanager
def _cgroup(name: str) -> Generator[Path]:
    """A cgroup with next to no memory. Raises OSError where there can be none."""
    is_first = (CGROUPS / "memory").is_dir()
    group = (CGROUPS / "memory" if is_first else CGROUPS) / name
    group.mkdir()
    try:
        limit = "memory.limit_in_bytes" if is_first else "memory.max"
        (group / limit).write_text(str(LIMIT_BYTES))
        if not is_first:
            (group / "memory.swap.max").write_text("0")
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """A process that lives on goes back to where it came from."""
    for pid in (group / "cgroup.procs").read_text().split():
        with suppress(OSError):
            (group.parent / "cgroup.procs").write_text(pid)
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        # Killed processes are counted until they have ended.
        with suppress(OSError):
            os.rmdir(group)
            return
        time.sleep(0.1)


def _num_killed(group: Path) -> int:
    file = group / "memory.oom_control"
    lines = (file if file.exists() else group / "memory.events").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
