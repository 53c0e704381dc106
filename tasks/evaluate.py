"""An evaluation: a run of which only the validation takes place, by a model as it is on disk."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.accounting.metrics import evaluation_metrics, evaluation_report, validation_metrics
from engines.histospec.workers import HistoryWorkers
from engines.inference.drafting.drafters import Drafters
from engines.inference.engine.checkpoint_engine import CheckpointEngine
from engines.inference.engine.ray_engine import RayEngine
from engines.learn.trainer import TrainerGroup
from engines.reports.progress import Progress, TerminalProgress
from engines.reward import ScorerPool
from engines.rollout.coordinator import Coordinator
from engines.store.actor import StoreClient, start_store
from engines.tracking.tracker import Tracker, add_to_run, mark_killed
from schemas.config import TrainConfig
from schemas.evaluation import EvaluationReport
from schemas.run import RunRef
from schemas.step import RewardedBatch, RolloutBatch
from schemas.weights import PolicyWeights
from tasks.report import log_stage
from tasks.run.artifacts import StepPages
from tasks.run.attach import SCORER, STORE, Run, attach
from tasks.run.engines import Engines, RolloutEngines
from tasks.run.live import LiveRun, make_ref, recorded
from tasks.run.milestones import Milestones
from tasks.run.preflight import Inputs, read_inputs
from tasks.run.ray_cluster import ray_cluster
from tasks.run.run_dir import STORE_FILE, claim_run_dir, clear_up, made_known

EXPERIMENT = "refrain evaluations"
"""Experiment of MLflow that evaluations are listed in."""
EVALUATION_FILE = "evaluation.json"


@asynccontextmanager
async def open_evaluation(
    config: TrainConfig, policy_version: int, resume: bool
) -> AsyncGenerator[LiveRun]:
    """A run with neither trainer nor drafters, opened and closed as `open_run` does.

    Raises:
        ValueError: bad input, before anything is started.
    """
    inputs = read_inputs(config)
    async with AsyncExitStack() as stack:
        stack.callback(claim_run_dir(config, resume).release)
        progress = TerminalProgress()
        stack.callback(progress.close)
        progress.phase("starting Ray and the engines")
        rollout = config.rollout
        wanted, what = rollout.num_engines * rollout.tp_degree, "the engines (rollout.num_engines)"
        num_gpus = stack.enter_context(ray_cluster(config.name, wanted, what))
        pages = StepPages(config.run_dir, config.name, progress.phase)
        stack.callback(pages.close)
        live = _make_run(config, inputs, policy_version, num_gpus, progress, pages)
        coordinator, scorers = live.engines.coordinator, live.run.scorers
        stack.push_async_callback(coordinator.shutdown)
        stack.push_async_callback(scorers.shutdown)
        stack.enter_context(made_known(live.ref))
        stack.enter_context(recorded(live.run))
        await asyncio.gather(coordinator.start(), scorers.start())
        yield live


def end_cancelled_evaluation(config: TrainConfig) -> None:
    """Clear up after an evaluation that was killed as it took too long to leave."""
    if clear_up(config.run_dir):
        mark_killed(config, os.environ.get("MLFLOW_TRACKING_URI"), config.runs_dir.parent)


def _make_run(
    config: TrainConfig,
    inputs: Inputs,
    policy_version: int,
    num_gpus: int,
    progress: Progress,
    pages: StepPages,
) -> LiveRun:
    """Nothing of it is started but the store."""
    gpus = config.rollout.tp_degree if num_gpus else 0
    engines = [
        RayEngine(index, config.engine, gpus, engine_class=CheckpointEngine)
        for index in range(config.rollout.num_engines)
    ]
    run = Run(
        make_ref(config, policy_version),
        config,
        inputs,
        store=StoreClient(start_store(config.run_dir / STORE_FILE, name=STORE)),
        trainer=TrainerGroup(config),
        scorers=ScorerPool(config, SCORER),
        history=HistoryWorkers(config.history_dir, config.drafting, progress.phase),
        tracker=Tracker(
            config,
            os.environ.get("MLFLOW_TRACKING_URI"),
            experiment=EXPERIMENT,
            runs_dir=config.runs_dir.parent,
        ),
        pages=pages,
        progress=progress,
    )
    milestones = Milestones(PolicyWeights(policy_version, None, ()), 0, policy_version)
    coordinator = Coordinator(engines, max_restarts=config.rollout.max_restarts)
    drafters = Drafters((), engines, 0, progress.phase, num_gpus=0)
    made = RolloutEngines(engines)
    return LiveRun(run, Engines(coordinator, drafters, made, milestones.queued), milestones)


@task(cache_policy=NO_CACHE)
async def report_evaluation(
    ref: RunRef, batch: RolloutBatch, rewarded: RewardedBatch
) -> EvaluationReport:
    """Write an evaluation to its directory and to MLflow."""
    run = attach(ref)
    rewards = await run.store("rewards", batch.split, batch.step)
    sources = {key: prompt.data_source for key, prompt in run.inputs.prompts.items()}
    report = evaluation_report(run.config, batch, rewarded, rewards, sources)
    run.tracker.log_metrics(validation_metrics(rewarded, report.figures), batch.step)
    await log_stage(run, batch)
    (run.config.run_dir / EVALUATION_FILE).write_text(report.model_dump_json(indent=2) + "\n")
    return report


@task(cache_policy=NO_CACHE)
async def add_to_training_run(report: EvaluationReport, run_dir: Path) -> None:
    """Add the figures to the MLflow run of the run that the checkpoint belongs to."""
    metrics = evaluation_metrics(report)
    add_to_run(run_dir, os.environ.get("MLFLOW_TRACKING_URI"), metrics, report.policy_version)
