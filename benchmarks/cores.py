"""CPU cores of a run: measure how busy they are, and reserve some for a part of the run."""

import os
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil

LOOK_S = 2.0
"""Seconds between two looks at a run's processes."""
TRAINER = "TrainerActor"
"""Part of the name of a trainer's process."""


def halves(whose: str = "a trainer") -> tuple[set[int], set[int]]:
    """Return this process's cores in two halves. The first is the larger one, the second is for
    `whose`.

    Raise ValueError if there is only one core.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ValueError(f"{whose} with cores of its own needs at least 2 cores: there is 1")
    first = (len(cores) + 1) // 2
    return set(cores[:first]), set(cores[first:])


@contextmanager
def only(cores: set[int]) -> Generator[None]:
    """Restrict processes and threads that this thread starts to these cores, while this lasts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class CoreWatch:
    """CPU seconds over time of a process and all its descendants."""

    def __init__(self, pid: int, trainer_cores: set[int] | None = None) -> None:
        """`trainer_cores`: pin the trainer to these cores. None does not pin it."""
        self._root = psutil.Process(pid)
        self._trainer_cores = trainer_cores
        self._of_process: dict[psutil.Process, float] = {}
        self._seen: list[tuple[float, float]] = []
        """Pairs of Unix time and CPU seconds used until then."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="cores")

    def __enter__(self) -> "CoreWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def used_s(self, start_s: float, end_s: float) -> float:
        """Return the CPU seconds used between two Unix times."""
        times_s, used_s = np.array(self._seen).T
        before, after = np.interp([start_s, end_s], times_s, used_s)
        return float(after - before)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            with suppress(psutil.NoSuchProcess):
                self._look()

    def _look(self) -> None:
        for process in [self._root, *self._root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._of_process[process] = times.user + times.system
                if self._trainer_cores:
                    pin([process], TRAINER, self._trainer_cores)
        self._seen.append((time.time(), sum(self._of_process.values())))


def pin(processes: Iterable[psutil.Process], name: str, cores: set[int]) -> int:
    """Pin the processes with this in their names to these cores; return their number."""
    num = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if name in "".join(process.cmdline()[:1]):
                num += 1
                for thread in threads_of(process.pid):
                    os.sched_setaffinity(thread, cores)
    return num


def threads_of(pid: int) -> Iterator[int]:
    with suppress(FileNotFoundError):
        for directory in Path("/proc", str(pid), "task").iterdir():
            yield int(directory.name)
