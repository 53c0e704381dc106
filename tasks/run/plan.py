"""Plan a run: resolve everything that it needs, once, before anything starts.

    config, resume ──plan_run──► RunPlan ──open_run──► live run

`plan_run` reads only. The command line makes a plan to refuse bad input early, and a flow makes its
own when it starts, because Prefect starts flows with a config alone. Everything below takes a plan
or a part of it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from refrain.schemas.base import with_absolute_paths
from refrain.schemas.config import TrainConfig
from refrain.schemas.resume import SettingChange
from refrain.tasks.run.machine import MemoryPlan, plan_engines, plan_training
from refrain.tasks.run.preflight import Inputs, read_inputs
from refrain.tasks.run.resuming import Resumption, check_resumable
from refrain.tasks.run.run_dir import (
    CONFIG_FILE,
    STORE_FILE,
    check_deletable,
    check_run_dir,
    refuse_live,
)
from refrain.tasks.run.split import with_gpu_split
from refrain.tasks.run.start_date import dated


@dataclass(frozen=True)
class Addresses:
    """Files and servers that a run works with."""

    store: Path
    """File of the run's store."""
    ray: str
    """Address of a Ray cluster. `local`: the run starts its own."""
    mlflow: str | None
    """MLflow's tracking URI. None: files beside the runs."""
    prefect: str | None
    """API of Prefect's server. None: the run starts its own."""


@dataclass(frozen=True)
class RunPlan:
    """A run that passed all checks, with everything resolved. Nothing has started yet."""

    config: TrainConfig
    """Final settings: a local model, a GPU split and a date."""
    inputs: Inputs
    memory: MemoryPlan
    addresses: Addresses
    resume: bool = False
    overwrites: bool = False
    """Whether to delete an earlier run of this name."""
    renews_store: bool = False
    """Whether to replace the store of a resumed run (--new-store)."""
    changes: tuple[SettingChange, ...] = ()
    """Settings of a resumed run that changed."""
    resumption: Resumption = field(default_factory=Resumption)
    gpu_split: str = ""
    """A sentence about the split of GPUs, if this plan made it (`specactor.split_gpus`)."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what the plan decided, and about parts that a resumed run lacks."""
        return (*filter(None, [self.gpu_split]), *self.resumption.notes)

    @property
    def located(self) -> TrainConfig:
        """The config with absolute paths, for processes with another working directory."""
        return with_absolute_paths(self.config)


def plan_run(
    config: TrainConfig,
    resume: bool,
    *,
    overwrite: bool = False,
    new_store: bool = False,
    gpus: str | None = None,
) -> RunPlan:
    """Plan a training run of a local model, and change nothing on disk. Raise ValueError for bad
    input.

    `overwrite`: delete an earlier run, unless it is resumed. `new_store`: replace the store of the
    resumed run. `gpus`: plan the memory for these GPUs, for example 8xH100-80GB.
    """
    if new_store and not resume:
        raise ValueError("--new-store works with --resume only: give --resume RUN too")
    config, gpu_split = with_gpu_split(config)
    plan = _plan(config, resume, overwrite and not resume, lambda it: plan_training(it, gpus))
    found = check_resumable(plan.located, new_store=new_store) if resume else Resumption()
    return replace(plan, resumption=found, gpu_split=gpu_split, renews_store=new_store)


def plan_evaluation(config: TrainConfig, resume: bool, *, overwrite: bool = False) -> RunPlan:
    """Plan a run that only validates, without a trainer. Raise ValueError for bad input."""
    if not (resume or overwrite) and (config.run_dir / CONFIG_FILE).exists():
        raise ValueError(
            f"there is an evaluation in {config.run_dir} already: continue it with --resume, "
            "delete it with --overwrite, or give this one another --name"
        )
    return _plan(config, resume, overwrite and not resume, plan_engines)


def plan_again(plan: RunPlan) -> RunPlan:
    """Return the plan to resume a run that crashed. Only the state on disk is read again. Raise
    ValueError when it cannot be resumed."""
    found = check_resumable(plan.located)
    return replace(plan, resume=True, changes=(), gpu_split="", resumption=found)


def _plan(
    config: TrainConfig,
    resume: bool,
    overwrites: bool,
    plan_memory: Callable[[TrainConfig], MemoryPlan],
) -> RunPlan:
    config = dated(config, resume)
    changes: list[SettingChange] = []
    if overwrites:
        check_deletable(config.run_dir)
    else:
        changes = check_run_dir(config, resume)
        refuse_live(config.run_dir)
    return RunPlan(
        config,
        read_inputs(config),
        plan_memory(config),
        _addresses(config),
        resume,
        overwrites,
        changes=tuple(changes),
    )


def _addresses(config: TrainConfig) -> Addresses:
    return Addresses(
        store=(config.run_dir / STORE_FILE).absolute(),
        ray=os.environ.get("RAY_ADDRESS", "local"),
        mlflow=os.environ.get("MLFLOW_TRACKING_URI"),
        prefect=os.environ.get("PREFECT_API_URL"),
    )
