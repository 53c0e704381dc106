"""Access to a live run: `open_run` in the driver, `attach` in any process.

driver   open_run ──starts──► named Ray actors: store, trainer ranks, scorer, history workers
   │                                                       ▲
live.json (RunRef) ──► another process: attach ──finds─────┘
"""

import gc
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from refrain.engines.failures import Failures
from refrain.engines.histospec.workers import HistoryWorkers
from refrain.engines.learn.mirror import CheckpointCopies
from refrain.engines.learn.trainer import TrainerGroup
from refrain.engines.reports.progress import Progress, TerminalProgress
from refrain.engines.reward import ScorerPool
from refrain.engines.specactor.health import DrafterHealth
from refrain.engines.store.actor import StoreClient, StoredRows
from refrain.engines.tracking.tracker import Tracker
from refrain.engines.user_files import read_model
from refrain.schemas.base import with_absolute_paths
from refrain.schemas.config import TrainConfig
from refrain.schemas.run import RunRef
from refrain.tasks.run.artifacts import StepPages
from refrain.tasks.run.preflight import Inputs, read_inputs
from refrain.tasks.run.ray_cluster import join_cluster
from refrain.tasks.run.run_dir import REF_FILE, is_live, read_config

STORE, TRAINER, SCORER, HISTORY = "store", "trainer", "scorer", "history"
"""Names of a run's actors. The names of trainer ranks and history workers end with a number."""


class RunNotLive(RuntimeError):
    """A run or one of its actors has ended."""


@dataclass
class Run:
    """A run's config, data, actors and records. `open_run` starts the actors and makes a Run, and
    `attach` makes one for actors that exist."""

    ref: RunRef
    config: TrainConfig
    inputs: Inputs
    store_client: StoreClient
    trainer: TrainerGroup
    scorers: ScorerPool
    history: HistoryWorkers
    """Has no workers when drafting is off."""
    tracker: Tracker
    pages: StepPages
    progress: Progress
    failures: Failures
    """Failures to record something. They do not end the run."""
    copies: CheckpointCopies | None = None
    """Copies of the checkpoints (`trainer.checkpoint_url`), in the process that drives the run."""

    async def store(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the run's `engines.store.store.Store`."""
        return await self.store_client.call(method, *args, **kwargs)

    async def drafter_health(self, before_step: int) -> DrafterHealth:
        """Return each drafter's acceptance in the training steps before this one."""
        health = DrafterHealth()
        drafted = await self.store("drafted", before_step) if self.inputs.ladder else []
        for drafter, version, num_accepted, num_rejections in drafted:
            health.add(version, drafter, num_accepted, num_rejections)
        return health

    async def rows(self, method: str, *args: Any, **kwargs: Any) -> StoredRows:
        """Return a reference to rows of the run's store, for another process."""
        return await self.store_client.rows(method, *args, **kwargs)


_RUNS: dict[RunRef, Run] = {}
"""Runs that this process is attached to."""


def attach(ref: RunRef) -> Run:
    """Return a live run, and attach this process to it if necessary. Raise RunNotLive when the run
    or one of its actors has ended."""
    if ref not in _RUNS:
        _RUNS[ref] = _attach(ref)
    return _RUNS[ref]


@contextmanager
def attached(run: Run) -> Generator[None]:
    """Let `attach` return this run inside the block."""
    _RUNS[run.ref] = run
    # Freeze the libraries' objects: otherwise each full garbage collection takes half a second.
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        del _RUNS[run.ref]


def _attach(ref: RunRef) -> Run:
    _require_live(ref)
    config = with_absolute_paths(read_config(ref.run_dir), ref.working_dir)
    join_cluster(ref.ray_address, ref.ray_namespace, ref.ray_token)
    inputs = read_inputs(config)
    progress = TerminalProgress()
    trainer, scorers = TrainerGroup(config), ScorerPool(config)
    history = HistoryWorkers(config.history_dir, config.engine.drafting, progress.phase)
    trainer.adopt([_find(ref, f"{TRAINER}-{rank}") for rank in range(config.trainer.num_processes)])
    scorers.adopt(_find(ref, SCORER))
    history.adopt(_find_history(ref))
    tracking_uri = os.environ.get("MLFLOW_TRACKING_URI")
    failures = Failures(config.run_dir, progress.warn)
    return Run(
        ref,
        config,
        inputs,
        store_client=StoreClient(_find(ref, STORE)),
        trainer=trainer,
        scorers=scorers,
        history=history,
        tracker=Tracker(config, tracking_uri, failures, delivers=False),
        pages=StepPages(config.run_dir, config.name, failures, delivers=False),
        progress=progress,
        failures=failures,
    )


def _require_live(ref: RunRef) -> None:
    if not is_live(ref.run_dir):
        raise RunNotLive(f"run {ref.run_dir} is not live: {_start(ref)}")
    file = ref.run_dir / REF_FILE
    if not file.exists() or read_model(file, RunRef) != ref:
        raise RunNotLive(
            f"run {ref.run_dir} is live, but this reference is outdated: use the one in "
            f"{file}, which exists once the run has started"
        )


def _find(ref: RunRef, name: str) -> Any:
    import ray

    try:
        return ray.get_actor(name, ref.ray_namespace)
    except ValueError as error:
        raise RunNotLive(f"run {ref.run_dir} has no live {name}: {_start(ref)}") from error


def _find_history(ref: RunRef) -> list[Any]:
    """Return the history workers, one per node. Empty: drafting is off."""
    from ray.util import list_named_actors

    found = [
        actor["name"]
        for actor in list_named_actors(all_namespaces=True)
        if actor["namespace"] == ref.ray_namespace and actor["name"].startswith(HISTORY)
    ]
    return [_find(ref, f"{HISTORY}-{share}") for share in range(len(found))]


def _start(ref: RunRef) -> str:
    return f"start it with refrain train --resume {ref.run_dir}"
