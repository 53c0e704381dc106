"""Run a process out of memory: the kernel kills it at the limit of a cgroup of its own."""

import os
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
LIMIT_BYTES = 2**20
"""Less than any process needs: the next page it touches exceeds the limit."""
KILL_S = 60.0
"""Longest time until the process touches a new page."""


def run_out_of_memory(process: psutil.Process) -> str:
    """Kill the process and return how. If this user cannot make a cgroup, SIGKILL replaces the
    kernel's kill."""
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
    """Yield a cgroup with almost no memory. Raise OSError if it cannot be made."""
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
    """Remove the group. A process that survived returns to the parent group."""
    for pid in (group / "cgroup.procs").read_text().split():
        with suppress(OSError):
            (group.parent / "cgroup.procs").write_text(pid)
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        # The group counts killed processes until they have ended, and rmdir fails until then.
        with suppress(OSError):
            os.rmdir(group)
            return
        time.sleep(0.1)


def _num_killed(group: Path) -> int:
    file = group / "memory.oom_control"
    lines = (file if file.exists() else group / "memory.events").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
