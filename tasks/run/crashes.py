"""Crashes: failures that settings, data and code did not cause.

In a crash, a process or node dies or stops answering. The run then resumes by itself from its last
checkpoint. All other errors are raised, because they would happen again or need a decision.
"""

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path

from refrain.engines.actors import ActorError, ActorGone, NoAnswer
from refrain.engines.durable import causes, is_disk_full, write_durably
from refrain.engines.learn.teacher.client import TeacherError
from refrain.engines.rollout.interface import EngineDied, EngineFails, WeightsLost, WeightSyncError
from refrain.engines.store.actor import StoreTimeout
from refrain.engines.tracking.progress_file import readable_steps
from refrain.engines.user_files import readable_lines
from refrain.engines.weights_file import NoRoom, WrongFile
from refrain.schemas.resume import Crash
from refrain.tasks.run.config_record import CONFIG_FILE
from refrain.tasks.run.ray_cluster import RayDied

CRASHES_FILE = "crashes.jsonl"
"""File with the crashes after which the run resumed, one `schemas.resume.Crash` per line."""
_RAISED = (ValueError, WeightSyncError, EngineFails, NoRoom, WrongFile)
"""Errors that are no crashes: bad settings, data, code or weights, and a full memory."""
_CRASHED = (RayDied, EngineDied, ActorGone, NoAnswer, StoreTimeout, WeightsLost)
_OF_ANOTHER_RANK = re.compile(r"gloo/transport|NCCL|DistBackendError|[Cc]onnection (closed|reset)")
"""Errors of a trainer rank whose peer has died."""


def is_crash(error: BaseException) -> bool:
    """Return whether to resume from the last checkpoint. Go through the causes of the error, from
    the outermost to the innermost. The first one of a known kind decides."""
    if any(isinstance(one, TeacherError) for one in _all(error)):
        return False  # It has been waited for, and its message may be like that of a lost rank.
    if is_disk_full(error) or any(map(_interrupts, causes(error))):
        return False
    return next((decided for decided in map(_decides, _all(error)) if decided is not None), False)


def _interrupts(error: BaseException) -> bool:
    """Return whether a signal caused the error. A cancellation does not count: a timeout may have
    caused it."""
    return not isinstance(error, Exception | asyncio.CancelledError)


def _all(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, including the causes inside an actor."""
    for cause in causes(error):
        yield cause
        if isinstance(cause, ActorError) and cause.cause is not None:
            yield from causes(cause.cause)


def _decides(error: BaseException) -> bool | None:
    from ray.exceptions import RayError, RayTaskError

    if isinstance(error, _RAISED) and not isinstance(error, WeightsLost):
        return False
    if isinstance(error, _CRASHED):
        return True
    if isinstance(error, RayError) and not isinstance(error, RayTaskError):
        return True
    return True if _OF_ANOTHER_RANK.search(str(error)) else None


def has_begun(run_dir: Path) -> bool:
    """Return whether there is a run to resume."""
    return (run_dir / CONFIG_FILE).exists()


def note_crash(run_dir: Path, error: Exception, num_left: int) -> str:
    """Add a crash to the run's record. Return a sentence about it. `num_left`: crashes that the run
    may still have, this one included."""
    steps, _ = readable_steps(run_dir)
    step = steps[-1].step if steps else 0
    crash = Crash(at_s=time.time(), step=step, error=f"{type(error).__name__}: {error}")
    before, _ = readable_lines(run_dir / CRASHES_FILE, Crash)
    lines = [one.model_dump_json() + "\n" for one in [*before, crash]]
    write_durably(run_dir / CRASHES_FILE, "".join(lines))
    said = f"crashed {crash}; resuming from the last checkpoint ({num_left - 1} more allowed)"
    print(said, flush=True)
    return said


def read_crashes(run_dir: Path) -> list[Crash]:
    """Return the crashes of all processes of the run, the oldest first. Raise ValueError for a
    damaged file."""
    crashes, wrong = readable_lines(run_dir / CRASHES_FILE, Crash)
    if wrong:
        raise ValueError(f"{wrong[0]}: remove the line")
    return crashes
