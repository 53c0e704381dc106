"""Prefect tasks of a training run, with advice in the errors that Prefect shows."""

import shutil
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.utilities.annotations import opaque

from refrain.engines.durable import is_disk_full, mount_of
from refrain.engines.learn.checkpoint import CHECKPOINTS, latest_checkpoint
from refrain.engines.learn.trainer import TrainerError
from refrain.engines.reward import ScorerHangs
from refrain.engines.rollout.interface import (
    EngineDied,
    EngineFails,
    EngineGone,
    WeightsLost,
    WeightSyncError,
)
from refrain.engines.rollout.slow_policy import SlowPolicy
from refrain.engines.store.actor import CALL_TIMEOUT_S, StoreTimeout
from refrain.schemas.run import RunRef
from refrain.tasks.run.ray_cluster import ray_files, ray_logs

P = ParamSpec("P")
T = TypeVar("T")
_ADVICE = {
    EngineFails: "This error would happen again, so the engine was not restarted. The full error "
    "is in Ray's logs, in {logs} on its node. Out of memory: lower rollout.kv_cache_bytes or "
    "rollout.max_num_seqs. Error of the model: vLLM cannot serve it on this hardware, or with "
    "this model.dtype.",
    EngineGone: "No engine is left. Bring the node back, or lower rollout.num_engines to a number "
    "that fits on the remaining GPUs.",
    EngineDied: "It died 4 times in a row, or 11 times in all. The reason is in Ray's logs, "
    "in {logs} on its node. Out of memory: lower rollout.kv_cache_bytes or "
    "rollout.max_num_seqs. Too slow to start or to answer: raise "
    "rollout.stall_timeout_s.",
    WeightsLost: "The trainer process that wrote the weights has died, or the engine is some steps "
    "behind the trainer: give engines more cores, or use fewer pat.tp_degrees.",
    WeightSyncError: "Nothing was generated with these weights. Try model.dtype=float32. If "
    "trainer and engines differ by more than 1e-3 there, they are not the same model. If they "
    "agree, your engines round more than the trainer in bfloat16: set rollout.canary_tolerance "
    "above the difference, for example to 0.1.",
    TrainerError: "Too slow: raise trainer.timeout_s. Out of memory: lower "
    "trainer.micro_batch_tokens, or raise trainer.num_processes. If it must hold a long sample, "
    "raise trainer.context_parallel too.",
    SlowPolicy: "Switch off the technique that it controls, or list fewer pat.tp_degrees.",
    ScorerHangs: "Its process is stopped, or the driver's node lacks memory or CPU time: check "
    "that node. If one response takes longer to score: raise reward.timeout_s.",
}


class TaskFailed(RuntimeError):
    """A task's error, with advice on how to fix it."""


class RunTask(Task[P, T]):
    """A task whose arguments Prefect does not search for results of other tasks.

    The search would visit every group of a plan. Prefect still links a task to those whose results
    are its arguments.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # ty: ignore[incompatible-method-override]
        call: Any = super().__call__
        return call(*map(opaque, args), **{name: opaque(kwargs[name]) for name in kwargs})


def run_task(
    body: Callable[Concatenate[RunRef, P], Coroutine[Any, Any, T]],
) -> Task[Concatenate[RunRef, P], Coroutine[Any, Any, T]]:
    """Make a Prefect task of a training run, and add advice to its errors."""
    return RunTask(with_advice(body), cache_policy=NO_CACHE)


def with_advice(
    body: Callable[Concatenate[RunRef, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[RunRef, P], Coroutine[Any, Any, T]]:
    """Wrap a task's body so that its errors get advice."""

    @wraps(body)
    async def advised(ref: RunRef, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await body(ref, *args, **kwargs)
        except Exception as error:
            advice = advise(error, ref.run_dir)
            if advice is None:
                raise
            has_one = latest_checkpoint(ref.run_dir / CHECKPOINTS)
            then = "Then resume from the last" if has_one else "Then start again: there is no"
            raise TaskFailed(
                f"{error}\n{advice} {then} checkpoint: "
                f"refrain train --resume {ref.run_dir} [SETTING=VALUE]..."
            ) from error

    return advised


def advise(error: Exception, run_dir: Path) -> str | None:
    """Return advice on an error. None: the error is clear enough by itself, or unknown."""
    if is_disk_full(error):
        return (
            f"A disk is full: of the run, {_room(run_dir)}; of Ray's files, {_room(ray_files())}. "
            "Free space there, or lower trainer.keep_checkpoints. Everything stored is intact."
        )
    for kind, advice in _ADVICE.items():
        if isinstance(error, kind):
            return advice.format(logs=ray_logs())
    if isinstance(error, StoreTimeout):
        return (
            f"The run's DuckDB file did not finish this in {CALL_TIMEOUT_S:.0f} s: check whether "
            f"the disk of {run_dir} is slow or full, and move runs_dir to a local disk."
        )
    return None


def _room(path: Path) -> str:
    mount = mount_of(path)
    return f"{path}, mounted at {mount}, has {shutil.disk_usage(mount).free / 1e6:,.0f} MB free"
