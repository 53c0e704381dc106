"""Processes that an engine leaves on its node when it dies, and the memory of GPUs that they keep.

An engine's actor marks what it starts. Whoever comes to the same GPUs waits until all that is
marked has been killed and has ended, and until the driver has taken back its memory.
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
"""Longest time until processes that were killed have ended, and so long again until their memory
is free."""
LOOK_S = 0.25
"""Seconds between two looks at the memory of GPUs."""


@dataclass(frozen=True)
class Marked:
    """The processes of one engine, over one life of its actor."""

    mark: str
    node_id: str
    gpu_ids: tuple[int, ...]
    """GPUs that they use, as the driver numbers them."""


def mark_children(mark: str) -> None:
    """Have the processes that this one starts from here on, and those that they start, be found by
    `mark`."""
    os.environ[MARK] = mark


def given_gpus() -> tuple[int, ...]:
    """GPUs that Ray has given this actor."""
    return tuple(sorted(map(int, ray.get_gpu_ids())))


class Undertaker:
    """Actor on the node of an engine that died."""

    def end(self, marked: Marked) -> None:
        """Kill what is left of it. Raises RuntimeError when that does not end."""
        end_processes(marked.mark)
        if marked.gpu_ids:
            wait_until_steady(lambda: -sum(free for free, _ in memory_of(marked.gpu_ids)))


def end_processes(mark: str) -> None:
    """Kill all that is marked so. Raises RuntimeError when some of it does not end."""
    found = [process for process in psutil.process_iter() if _mark_of(process) == mark]
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, left = psutil.wait_procs(found, END_S)
    if left:
        named = ", ".join(f"{process.name()} ({process.pid})" for process in left)
        raise RuntimeError(f"killed, and still there after {END_S:.0f} s: {named}")


def _mark_of(process: psutil.Process) -> str | None:
    with suppress(psutil.Error):
        return process.environ().get(MARK)
    return None


def wait_until_steady(used: Callable[[], int]) -> None:
    """Return when what is used falls no more. Raises RuntimeError when it goes on to."""
    deadline, before = time.monotonic() + END_S, used()
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        now = used()
        if now >= before:
            return
        before = now
    raise RuntimeError(f"the memory of its GPUs was still being freed after {END_S:.0f} s")


def memory_of(gpu_ids: tuple[int, ...]) -> list[tuple[int, int]]:
    """(free, total) bytes of each of these GPUs, whoever has the rest; none where Ray has been told
    of GPUs that are not there."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    ids = ["-i", ",".join(map(str, gpu_ids))]
    told = subprocess.run(query + ids, capture_output=True, text=True, timeout=END_S, check=True)
    rows = (line.split(",") for line in told.stdout.splitlines() if line.strip())
    return [(int(free) * 2**20, int(total) * 2**20) for free, total in rows]
