"""Advice on a task that failed, in the message that Prefect shows."""

import errno
from collections.abc import Callable, Coroutine, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE

from engines.learn.trainer import TrainerError
from engines.rollout.interface import EngineDied, EngineFails, WeightSyncError
from engines.store.actor import CALL_TIMEOUT_S
from schemas.run import RunRef

P = ParamSpec("P")
T = TypeVar("T")
_NO_SPACE = "No space left on device"
_STORE = "store ("
_ADVICE = {
    EngineFails: "So it was not tried again. Ray's logs, in /tmp/ray/session_latest/logs on its "
    "node, have the whole of it. Out of memory: lower rollout.kv_cache_bytes or "
    "rollout.max_num_seqs. Of the model: vLLM cannot serve it on this hardware, or with this "
    "model.dtype.",
    EngineDied: "It died more often than rollout.max_restarts allows. Ray's logs say why, in "
    "/tmp/ray/session_latest/logs on its node. Out of memory: lower rollout.kv_cache_bytes or "
    "rollout.max_num_seqs. Too slow to answer: raise rollout.stall_timeout_s or "
    "rollout.start_timeout_s.",
    WeightSyncError: "Nothing was generated with these weights. With model.dtype=float32 trainer "
    "and engines agree to rounding: if they do not, they are not the same model. In bfloat16 a few "
    "thousandths are rounding: raise rollout.canary_tolerance.",
    TrainerError: "Too slow: raise trainer.timeout_s. Out of memory: lower "
    "trainer.micro_batch_tokens or raise trainer.num_processes.",
}


class TaskFailed(RuntimeError):
    """A task's error and what helps against it."""


def run_task(
    body: Callable[Concatenate[RunRef, P], Coroutine[Any, Any, T]],
) -> Task[Concatenate[RunRef, P], Coroutine[Any, Any, T]]:
    """A Prefect task of a training run, whose errors say what to do."""
    return task(cache_policy=NO_CACHE)(with_advice(body))


def with_advice(
    body: Callable[Concatenate[RunRef, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[RunRef, P], Coroutine[Any, Any, T]]:
    """A task's body whose errors say what to do."""

    @wraps(body)
    async def advised(ref: RunRef, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await body(ref, *args, **kwargs)
        except Exception as error:
            advice = advise(error, ref.run_dir)
            if advice is None:
                raise
            raise TaskFailed(
                f"{error}\n{advice} Then go on from the last checkpoint: "
                f"refrain train --resume {ref.run_dir}"
            ) from error

    return advised


def advise(error: Exception, run_dir: Path) -> str | None:
    """None for an error that says itself what is wrong, or of which nothing is known."""
    if any(_is_disk_full(cause) for cause in _causes(error)):
        return (
            f"The disk of {run_dir}, or of Ray's files under /tmp/ray, is full: free space, or "
            "lower trainer.keep_checkpoints; what is durable is whole."
        )
    for kind, advice in _ADVICE.items():
        if isinstance(error, kind):
            return advice
    if isinstance(error, RuntimeError) and _STORE in str(error):
        return (
            f"The run's DuckDB file did not take this in {CALL_TIMEOUT_S:.0f} s: look whether "
            f"the disk of {run_dir} is slow or full, and move runs_dir to a local disk."
        )
    return None


def _is_disk_full(error: BaseException) -> bool:
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    return full or _NO_SPACE in str(error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, what caused that ..."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
