"""The live run: what its tasks share.

Prefect passes small typed models between tasks; actors, weights and the terminal are here. A
process drives one run at a time, and its tasks find it with `current_run`.
"""

import asyncio
import gc
import os
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

from engines.histospec.workers import HistoryWorkers
from engines.inference.drafting.drafters import Drafters
from engines.learn.checkpoint import checkpoints_dir, latest_checkpoint, read_state
from engines.learn.mirror import Mirror
from engines.learn.trainer import TrainerGroup
from engines.reports.progress import Everywhere, Progress, TerminalProgress
from engines.reward import ScorerPool
from engines.rollout.coordinator import Coordinator
from engines.specactor.health import DrafterHealth, HealthSettings
from engines.store.actor import StoreClient, StoredRows, start_store
from engines.tracking.mlflow_client import require_server
from engines.tracking.progress_file import ProgressFile
from engines.tracking.tracker import Tracker, is_known, mark_killed
from schemas.base import with_absolute_paths
from schemas.config import TrainConfig
from schemas.rollout import DraftSetting, FinishedRollout, Split
from schemas.step import RolloutBatch, RunSummary
from schemas.weights import PolicyWeights
from tasks.run.artifacts import StepPages
from tasks.run.engines import RolloutEngines, make_engines
from tasks.run.facts import log_run_facts
from tasks.run.milestones import Milestones
from tasks.run.preflight import Inputs, read_inputs
from tasks.run.ray_cluster import ray_cluster
from tasks.run.run_dir import STORE_FILE, SUMMARY_FILE, claim_run_dir, clear_up


class Run:
    """A run with everything started. Made by `open_run`."""

    def __init__(
        self,
        config: TrainConfig,
        inputs: Inputs,
        store: StoreClient,
        trainer: TrainerGroup,
        coordinator: Coordinator,
        scorers: ScorerPool,
        history: HistoryWorkers,
        drafters: Drafters,
        tracker: Tracker,
        pages: StepPages,
        progress: Progress,
        weights: PolicyWeights,
        engines: RolloutEngines,
    ) -> None:
        self.config = config
        self.inputs = inputs
        self.trainer = trainer
        self.coordinator = coordinator
        self.scorers = scorers
        self.history = history
        """Without workers when drafting is off."""
        self.drafters = drafters
        self.health = DrafterHealth(HealthSettings())
        """Of the drafters on the ladder."""
        self.mirror = mirror_of(config)
        """Of its checkpoints, where the config names one."""
        self.tracker = tracker
        self.pages = pages
        self.progress = progress
        self.weights = {weights.policy_version: weights}
        """Of the policy versions that a step may still be rolled out with."""
        self.first_version = weights.policy_version
        """That this process began with."""
        self.milestones = Milestones(weights.policy_version)
        self.last_batch: RolloutBatch | None = None
        """Of the last training step that was rolled out."""
        self.rolled_out_s = 0.0
        """When the last generation stage ended, on the event loop's clock."""
        self.reported_s = 0.0
        """When the last step was reported; Unix time."""
        self.engines = engines
        self._store = store

    def version_of(self, step: int) -> int:
        """The policy version that a step is rolled out with: as old as the mode allows, as newer
        ones come only when the engines have begun already."""
        return max(self.first_version, step - 1 - self.config.max_staleness)

    async def admits(self, step: int) -> None:
        """Return when a step's flow may be made. In a pipeline one is made beforehand: it takes
        Prefect a moment."""
        await self.turn(step - self.config.max_staleness)

    async def turn(self, step: int) -> None:
        """Return when a step may begin."""
        before = self.milestones.queued if self.config.max_staleness else self.milestones.committed
        await before.wait(step - 1)

    async def next_is_queued(self, step: int) -> None:
        """Return when the step after this one is generating, if there is one: then there is time
        for what holds up no step."""
        await self.milestones.queued.wait(min(step + 1, self.inputs.loader.num_steps))

    async def note_drafts(self, step: int) -> None:
        """Take in how often each drafter was right in a training step."""
        for drafter, version, drafted, accepted in await self.store("drafted", step):
            setting = DraftSetting(drafter, self.config.specactor.window)
            self.health.add(version, setting, drafted, accepted)

    async def store(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the run's `engines.store.store.Store`."""
        return await self._store.call(method, *args, **kwargs)

    async def keep(self, rollouts: Sequence[FinishedRollout], epoch: int) -> None:
        """Make finished rollouts durable (`StoreClient.add_finished`)."""
        await self._store.add_finished(rollouts, epoch)

    async def rows(self, method: str, *args: Any) -> StoredRows:
        """Rows of the run's store by reference, for another process."""
        return await self._store.rows(method, *args)


_CURRENT: ContextVar[Run] = ContextVar("current_run")


def current_run() -> Run:
    return _CURRENT.get()


@contextmanager
def running(run: Run) -> Generator[None]:
    """`run` is the current one while this lasts."""
    token = _CURRENT.set(run)
    # What libraries made stays: to look through it again and again takes half a second each time.
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _CURRENT.reset(token)


@asynccontextmanager
async def open_run(config: TrainConfig, resume: bool) -> AsyncGenerator[Run]:
    """Validate, claim the run's directory, start the actors, go back to the last checkpoint.

    On leaving, everything that was started is stopped, whatever happened.

    Raises:
        ValueError: bad input, before anything is started.
    """
    inputs = read_inputs(config)
    async with AsyncExitStack() as stack:
        lock = claim_run_dir(config, resume)
        stack.callback(lock.release)
        _look_at_mirror(config, resume)
        terminal = TerminalProgress()
        stack.callback(terminal.close)
        file = stack.enter_context(ProgressFile(config.run_dir, inputs.loader.num_steps))
        progress = Everywhere(terminal, file)
        if not is_known(config):
            require_server(os.environ.get("MLFLOW_TRACKING_URI"))
        for split, dataset in inputs.datasets.items():
            if dataset.num_duplicates:
                progress.phase(f"{split}: {dataset.num_duplicates} repeated prompts left out")
        progress.phase("starting Ray, the trainer and the engines")
        num_gpus = stack.enter_context(ray_cluster(config.name, *_gpus(config)))
        run = await _start_actors(with_absolute_paths(config), inputs, progress, num_gpus, stack)
        stack.enter_context(made_current(run))
        yield run


@contextmanager
def made_current(run: Run) -> Generator[None]:
    """Let tasks find this run; tell MLflow how it ended."""
    try:
        with running(run):
            yield
    except BaseException as error:
        run.tracker.close("FAILED" if isinstance(error, Exception) else "KILLED")
        raise
    else:
        run.tracker.close("FINISHED")
    finally:
        for sentence in missing_record(run):
            run.progress.phase(sentence)


def mirror_of(config: TrainConfig) -> Mirror | None:
    """Of the run's checkpoints. Raises ValueError for a URL that is none."""
    url = config.trainer.checkpoint_url
    return Mirror(url, config.name) if url else None


def _look_at_mirror(config: TrainConfig, resume: bool) -> None:
    """Fetch what a run that is resumed has lost. A new one must find none of another's."""
    mirror = mirror_of(config)
    if mirror is None:
        return
    if resume:
        mirror.fetch_newer(checkpoints_dir(config))
    elif steps := mirror.steps():
        raise ValueError(
            f"trainer.checkpoint_url: {config.trainer.checkpoint_url} holds step {steps[-1]} of "
            f"another run {config.name}: remove it there, or give this one another name=..."
        )


def end_cancelled(config: TrainConfig) -> None:
    """What `open_run` does on leaving, for a run that was killed as it took too long to leave."""
    if clear_up(config.run_dir):
        mark_killed(config, os.environ.get("MLFLOW_TRACKING_URI"))


async def _start_actors(
    config: TrainConfig,
    inputs: Inputs,
    progress: Progress,
    num_gpus: int,
    stack: AsyncExitStack,
) -> Run:
    checkpoint = latest_checkpoint(checkpoints_dir(config))
    version = 0
    if checkpoint is not None:
        state = read_state(checkpoint)
        inputs.loader.check_state(state.loader_state)
        version = state.policy_version
    store = StoreClient(start_store(config.run_dir / STORE_FILE))
    await store.call("truncate_after", version, version, config.max_staleness)
    trainer = TrainerGroup(config)
    stack.push_async_callback(trainer.shutdown)
    engines, coordinator, drafters = await _make_generation(
        config, inputs, progress, num_gpus, stack
    )
    history = HistoryWorkers(config.history_dir, config.drafting, progress.phase)
    stack.push_async_callback(history.shutdown)
    if config.drafting.enabled:
        history.start()
    scorers = ScorerPool(config)
    stack.push_async_callback(scorers.shutdown)
    await asyncio.gather(
        trainer.start(checkpoint), coordinator.start(), scorers.start(), drafters.start()
    )
    canaries = [prompt.token_ids for prompt in inputs.datasets[Split.TRAIN].prompts[:4]]
    weights = await trainer.publish(version, canaries)
    tracker = Tracker(config, os.environ.get("MLFLOW_TRACKING_URI"), progress.phase)
    log_run_facts(tracker, config)
    pages = StepPages(config.run_dir, config.name, progress.phase)
    stack.callback(pages.close)
    progress.begin(version)
    run = Run(
        config,
        inputs,
        store,
        trainer,
        coordinator,
        scorers,
        history,
        drafters,
        tracker,
        pages,
        progress,
        weights,
        engines,
    )
    if inputs.ladder is not None:
        for step in range(max(1, version + 1 - HealthSettings().num_recent), version + 1):
            await run.note_drafts(step)
    return run


async def _make_generation(
    config: TrainConfig,
    inputs: Inputs,
    progress: Progress,
    num_gpus: int,
    stack: AsyncExitStack,
) -> tuple[RolloutEngines, Coordinator, Drafters]:
    """Nothing of it is started."""
    times = inputs.latency.profile.model_dump_json() if inputs.latency else None
    engine = config.engine.model_copy(update={"profile_json": times})
    engines = await make_engines(config, engine, num_gpus)
    coordinator = Coordinator(
        engines.engines,
        max_restarts=config.rollout.max_restarts,
        pools=engines.pools,
        keep_parked_current=engines.keeps_weights,
    )
    stack.push_async_callback(coordinator.shutdown)
    drafters = Drafters(
        engine.drafter_processes,
        engines.engines,
        config.specactor.max_restarts,
        progress.phase,
        num_gpus=1 if num_gpus else 0,
    )
    stack.push_async_callback(drafters.shutdown)
    return engines, coordinator, drafters


async def write_summary(run: Run, wall_s: float) -> RunSummary:
    """Write `summary.json`; `wall_s` is this process's own time."""
    summary: RunSummary = await run.store("summary", wall_s)
    await asyncio.gather(asyncio.to_thread(run.tracker.flush), asyncio.to_thread(run.pages.flush))
    summary = summary.model_copy(update={"missing": tuple(missing_record(run))})
    path = run.config.run_dir / SUMMARY_FILE
    path.write_text(summary.model_dump_json(indent=2) + "\n")
    return summary


def missing_record(run: Run) -> list[str]:
    """What MLflow and Prefect do not have of the run, in sentences for people."""
    return [*run.tracker.missing(), *run.pages.missing()]


def _gpus(config: TrainConfig) -> tuple[int, str]:
    """GPUs that the run takes where there are any, and what for."""
    rollout, trainer = config.rollout, config.trainer
    num_drafters = len(config.engine.drafter_processes)
    what = (
        f"{rollout.num_engines} engines of tp_degree {rollout.tp_degree} and "
        f"{trainer.num_processes} trainer processes (rollout.num_engines, rollout.tp_degree, "
        "trainer.num_processes)"
    )
    if num_drafters:
        what += f", and {num_drafters} drafters (specactor.draft_models)"
    return rollout.num_engines * rollout.tp_degree + trainer.num_processes + num_drafters, what
