"""What every process of vLLM gets from refrain."""

import multiprocessing
import sys
from pathlib import Path

import pytest

from engines.inference.engine.plugin import keep_locks_private


def semaphores_of_a_progress_bar(private: bool) -> list[str]:
    from multiprocessing.synchronize import SemLock

    from tqdm import tqdm

    made: list[str] = []
    create = SemLock.__init__

    def note(self, *args, **kwargs):
        create(self, *args, **kwargs)
        made.append(self._semlock.name)

    SemLock.__init__ = note  # type: ignore[method-assign]
    if private:
        keep_locks_private()
    list(tqdm([1], file=sys.stderr))
    return made


@pytest.mark.parametrize("private", [True, False])
def test_a_progress_bar_leaves_no_semaphore(private):
    """vLLM shows one when it loads a model, in processes that are killed in the end."""
    assert Path("/dev/shm").is_dir()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        made = pool.apply(semaphores_of_a_progress_bar, [private])
    assert bool(made) is not private
