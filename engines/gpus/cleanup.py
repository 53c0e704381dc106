"""Cleans up after a dead engine: processes left on its node, and GPU memory that they keep.

An engine's actor marks the processes that it starts. Before another process uses the same GPUs, it
waits until all marked processes are killed and have ended, and until their GPU memory is free.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil
import ray

MARK = "REFRAIN_ENGINE"
END_S = 30.0
"""Longest time until killed processes have ended, and again until their memory is free."""
LOOK_S = 0.25
"""Seconds between two readings of GPU memory."""


@dataclass(frozen=True)
class Marked:
    """The processes of one engine, over one life of its actor."""

    mark: str
    node_id: str
    gpu_ids: tuple[int, ...]
    """GPUs that they use, as the driver numbers them."""


def mark_children(mark: str) -> None:
    """Mark all processes that this one starts from now on, and their descendants."""
    os.environ[MARK] = mark


def given_gpus() -> tuple[int, ...]:
    """Return the GPUs that Ray has given this actor."""
    return tuple(sorted(map(int, ray.get_gpu_ids())))


class CleanupActor:
    """Actor on the node of a dead engine."""

    def end(self, marked: Marked) -> None:
        """Kill the engine's processes and wait for its GPU memory. Raise RuntimeError if either
        does not end."""
        end_processes(marked.mark)
        if marked.gpu_ids:
            wait_until_steady(lambda: -sum(free for free, _ in memory_of(marked.gpu_ids)))


def end_processes(mark: str) -> None:
    """Kill all processes with this mark. Raise RuntimeError if some do not end."""
    found = [process for process in psutil.process_iter() if _mark_of(process) == mark]
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, left = psutil.wait_procs(found, END_S)
    if left:
        named = ", ".join(f"{process.name()} ({process.pid})" for process in left)
        raise RuntimeError(f"killed, but still running after {END_S:.0f} s: {named}")


def _mark_of(process: psutil.Process) -> str | None:
    with suppress(psutil.Error):
        return process.environ().get(MARK)
    return None


def wait_until_steady(used: Callable[[], int]) -> None:
    """Return once the used bytes stop falling. Raise RuntimeError if they fall for too long."""
    deadline, before = time.monotonic() + END_S, used()
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        now = used()
        if now >= before:
            return
        before = now
    raise RuntimeError(f"the memory of its GPUs was still being freed after {END_S:.0f} s")


def memory_of(gpu_ids: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (free, total) bytes of each GPU. Memory of other processes is not free. Empty if Ray
    counts GPUs that this machine does not have."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    ids = ["-i", ",".join(map(str, gpu_ids))]
    told = subprocess.run(query + ids, capture_output=True, text=True, timeout=END_S, check=True)
    rows = (line.split(",") for line in told.stdout.splitlines() if line.strip())
    return [(int(free) * 2**20, int(total) * 2**20) for free, total in rows]
