"""Open and close a run in the process of its flow.

Prefect passes small typed models between tasks. One of them is a reference to the run. With it,
`attach` finds the run's actors from this process or any other. The engines' coordinator stays in
this process.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from refrain.engines.accounting.metrics import summary_metrics
from refrain.engines.data.loader import PromptLoader
from refrain.engines.durable import write_durably
from refrain.engines.failures import Failures
from refrain.engines.gpus.placement import GpuPlacement
from refrain.engines.histospec.workers import HistoryWorkers
from refrain.engines.learn.canaries import NUM_PROMPTS
from refrain.engines.learn.checkpoint import checkpoints_dir, read_state
from refrain.engines.learn.mirror import CheckpointCopies, CopyTimeout, within
from refrain.engines.learn.trainer import TrainerGroup
from refrain.engines.reports.progress import Everywhere, Progress, TerminalProgress
from refrain.engines.reward import ScorerPool
from refrain.engines.store.actor import StoreClient, start_store
from refrain.engines.tracking.mlflow_client import require_server
from refrain.engines.tracking.progress_file import ProgressFile
from refrain.engines.tracking.system_metrics import system_metrics
from refrain.engines.tracking.tracker import Tracker, is_known
from refrain.schemas.config import TrainConfig
from refrain.schemas.rollout import Split
from refrain.schemas.run import RunRef
from refrain.schemas.step import RunSummary
from refrain.tasks.run.artifacts import StepPages
from refrain.tasks.run.attach import HISTORY, SCORER, STORE, TRAINER, Run, attached
from refrain.tasks.run.engines import Engines, make_generation
from refrain.tasks.run.environments import start_environments
from refrain.tasks.run.gpus import TRAINER as THE_TRAINER
from refrain.tasks.run.gpus import wanted_gpus
from refrain.tasks.run.milestones import Milestones
from refrain.tasks.run.plan import RunPlan
from refrain.tasks.run.ray_cluster import ray_cluster, ray_logs, token_file, while_ray_lives
from refrain.tasks.run.resuming import Resumption, check_mirror, mirror_of, take_up
from refrain.tasks.run.run_dir import (
    SUMMARY_FILE,
    claim_run_dir,
    made_known,
    stop_leftovers,
)
from refrain.tasks.run.run_log import RunLog
from refrain.tasks.run.run_metadata import log_run_facts

FETCH_S = 3600.0
"""Seconds that a resumed run may take to fetch the copy of a checkpoint."""
HURRIED_COPY_S = 5.0
"""Seconds that an unfinished run waits for the copies of its checkpoints when it ends."""


@dataclass(frozen=True)
class LiveRun:
    """A run whose actors and engines have started, in the process of its flow."""

    run: Run
    engines: Engines
    milestones: Milestones

    @property
    def ref(self) -> RunRef:
        return self.run.ref


@asynccontextmanager
async def open_run(plan: RunPlan) -> AsyncGenerator[LiveRun]:
    """Claim the run's directory, start the actors, and restore the last checkpoint. Raise
    ValueError when a server or a mirror refuses the run.

    After the block, stop everything that was started, also after errors.
    """
    config, located, found = plan.config, plan.located, plan.resumption
    async with AsyncExitStack() as stack:
        check_mirror(config, plan.resume, plan.changes)
        lock = claim_run_dir(config, plan.resume)
        stack.callback(lock.release)
        # Kill the processes that survive Ray's end.
        stack.callback(stop_leftovers, config.run_dir)
        take_up(located, found)
        terminal = TerminalProgress()
        stack.callback(terminal.close)
        failures = Failures(config.run_dir, terminal.warn)
        stack.callback(failures.close)
        checkpoint = _fetch_lost(located, found, failures) if plan.resume else None
        file = ProgressFile(config.run_dir, plan.inputs.loader.num_steps, failures)
        progress = Everywhere(failures, terminal, stack.enter_context(file), RunLog())
        failures.warn = progress.warn
        for change in plan.changes:
            progress.phase(f"resumed with {change}")
        for note in (*plan.notes, *plan.inputs.warnings):
            progress.phase(note)
        if not is_known(config):
            require_server(plan.addresses.mlflow)
        progress.phase("starting Ray, the trainer and the engines")
        placement = stack.enter_context(ray_cluster(config.name, wanted_gpus(config)))
        advice = (
            f"Ray's logs are in {ray_logs()}. The system may have killed it for lack of memory. "
            f"Finished rollouts are kept: refrain train --resume {config.run_dir}. Add "
            "rollout.num_engines=N to this command if there are fewer GPUs now"
        )
        async with while_ray_lives(advice):
            live = await _start_actors(plan, checkpoint, progress, failures, placement, stack)
            needed = await live.run.trainer.nodes()
        file.begin(live.ref.first_version)
        stack.enter_context(made_known(live.ref))
        stack.enter_context(recorded(live.run))
        stack.enter_context(system_metrics(live.run.tracker.log_system, failures))
        async with while_ray_lives(advice, needed):
            yield live


@contextmanager
def recorded(run: Run) -> Generator[None]:
    """Let tasks of this process use the run, and report its end to MLflow."""
    try:
        with attached(run):
            yield
    except BaseException as error:
        run.tracker.close("FAILED" if isinstance(error, Exception) else "KILLED")
        if run.copies:
            run.copies.close(HURRIED_COPY_S)
        raise
    else:
        run.tracker.close("FINISHED")
    finally:
        for sentence in missing_record(run):
            run.progress.warn(sentence)


def _fetch_lost(config: TrainConfig, found: Resumption, failures: Failures) -> Path | None:
    """Fetch a newer checkpoint from the mirror. Return the checkpoint to resume from, or None.

    If the mirror fails, record that and use the run's own checkpoint. Without one, raise the error:
    the run would start from the beginning.
    """
    mirror = mirror_of(config)
    if mirror is None:
        return found.checkpoint
    directory = checkpoints_dir(config)
    try:
        what = f"fetching from {mirror.place}"
        return within(lambda: mirror.fetch_newer(directory), FETCH_S, what) or found.checkpoint
    except (OSError, CopyTimeout) as error:
        if found.checkpoint is None:
            raise
        failures.add("fetching a checkpoint's copy", error)
        return found.checkpoint


async def go_back(
    checkpoint: Path | None, loader: PromptLoader, store: StoreClient, max_staleness: int
) -> int:
    """Truncate the store to a checkpoint. Return its policy version, or 0 without a checkpoint.
    Raise ValueError for a checkpoint of other data."""
    version = 0
    if checkpoint is not None:
        state = read_state(checkpoint)
        loader.check_state(state.loader_state)
        version = state.policy_version
    await store.call("truncate_after", version, version, max_staleness)
    return version


async def _start_actors(
    plan: RunPlan,
    checkpoint: Path | None,
    progress: Progress,
    failures: Failures,
    placement: GpuPlacement,
    stack: AsyncExitStack,
) -> LiveRun:
    config, inputs = plan.located, plan.inputs
    store = StoreClient(start_store(plan.addresses.store, STORE))
    version = await go_back(checkpoint, inputs.loader, store, config.staleness)
    learnt: dict[int, str] = await store.call("learnt")
    engines = await make_generation(
        config, inputs.latency, version, placement, progress.phase, learnt=learnt
    )
    stack.push_async_callback(engines.coordinator.shutdown)
    stack.push_async_callback(engines.drafters.shutdown)
    nodes = placement.nodes.get(THE_TRAINER, ())
    gpus = engines.gpus[: len(nodes)] if config.takes_turns else ()
    trainer = TrainerGroup(
        config,
        TRAINER,
        nodes,
        gpus,
        state_leaves=engines.trainer_leaves,
        receivers=engines.hand_over,
    )
    stack.push_async_callback(trainer.shutdown)
    if config.takes_turns:
        engines.take_turns(trainer)
    history = HistoryWorkers(config.history_dir, config.engine.drafting, progress.phase, HISTORY)
    stack.push_async_callback(history.shutdown)
    if config.drafting.enabled:
        history.start(inputs.loader.steps_per_epoch, anew=checkpoint is None)
    scorers = ScorerPool(config, SCORER)
    stack.push_async_callback(scorers.shutdown)
    await start_environments(config, stack, placement, STORE)
    if gpus:  # Start the engines first, because they need empty GPUs.
        await asyncio.gather(engines.start(), scorers.start())
        await trainer.start(checkpoint)
    else:
        await asyncio.gather(trainer.start(checkpoint), engines.start(), scorers.start())
    for note in trainer.notes:
        progress.phase(note)
    prompts = inputs.datasets[Split.TRAIN].prompts[:NUM_PROMPTS]
    canaries = list(dict.fromkeys(prompt.token_ids for prompt in prompts))
    weights = await trainer.publish(version, canaries)
    for failure in weights.not_handed:
        progress.phase(f"{failure}; it reads the weights from their file instead")
    for warning in weights.warnings:
        progress.warn(warning)
    actors = (store, trainer, scorers, history)
    run = _make_run(make_ref(config, version), plan, actors, progress, failures)
    stack.callback(run.pages.close)
    num_steps = inputs.loader.num_steps
    validates = bool(config.data.validation)
    milestones = Milestones(
        weights, config.staleness, num_steps, engines.queued, validates=validates
    )
    return LiveRun(run, engines, milestones)


def _make_run(
    ref: RunRef,
    plan: RunPlan,
    actors: tuple[StoreClient, TrainerGroup, ScorerPool, HistoryWorkers],
    progress: Progress,
    failures: Failures,
) -> Run:
    """Return the run with its tracker, pages and checkpoint copies."""
    config, inputs = plan.located, plan.inputs
    tracker = Tracker(config, plan.addresses.mlflow, failures)
    with failures.contained("recording facts about the run"):
        log_run_facts(tracker, config, inputs)
    pages = StepPages(config.run_dir, config.name, failures)
    copies = None
    if mirror := mirror_of(config):
        keep = config.trainer.keep_checkpoints
        copies = CheckpointCopies(mirror, checkpoints_dir(config), keep, failures)
    return Run(ref, config, inputs, *actors, tracker, pages, progress, failures, copies)


def make_ref(config: TrainConfig, policy_version: int) -> RunRef:
    """Return the reference to this process's run, with the address of its Ray cluster."""
    import ray

    context = ray.get_runtime_context()
    return RunRef(
        run_dir=config.run_dir.absolute(),
        working_dir=Path.cwd(),
        ray_address=context.gcs_address,
        ray_token=token_file(),
        ray_namespace=context.namespace,
        first_version=policy_version,
    )


async def write_summary(run: Run, wall_s: float) -> RunSummary:
    """Write `summary.json`. `wall_s`: seconds that this process has run."""
    summary: RunSummary = await run.store("summary", wall_s)
    run.tracker.log_metrics(summary_metrics(summary), summary.steps)
    if run.copies and run.copies.missing():
        run.progress.phase("waiting for the copies of checkpoints")
        await asyncio.to_thread(run.copies.close)
    await asyncio.gather(asyncio.to_thread(run.tracker.flush), asyncio.to_thread(run.pages.flush))
    record = {"missing": tuple(missing_record(run)), "failures": dict(run.failures.counts)}
    summary = summary.model_copy(update=record)
    with run.failures.contained(f"writing {SUMMARY_FILE}"):
        path = run.config.run_dir / SUMMARY_FILE
        write_durably(path, summary.model_dump_json(indent=2) + "\n")
    return summary


def missing_record(run: Run) -> list[str]:
    """Return sentences about records that MLflow, Prefect or the mirror do not have yet."""
    copies = run.copies.missing() if run.copies else []
    return [*run.tracker.missing(), *run.pages.missing(), *copies]
