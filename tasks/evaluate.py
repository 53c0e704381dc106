"""An evaluation: a run of which only the validation takes place, by a model as it is on disk."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.accounting.evaluation import evaluation_report
from engines.accounting.metrics import evaluation_metrics, validation_metrics
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
from schemas.step import RewardedBatch, RolloutBatch
from schemas.weights import PolicyWeights
from tasks.report import log_stage
from tasks.run.artifacts import StepPages
from tasks.run.engines import RolloutEngines
from tasks.run.live import Run, current_run, made_current
from tasks.run.preflight import Inputs, read_inputs
from tasks.run.ray_cluster import ray_cluster
from tasks.run.run_dir import STORE_FILE, claim_run_dir, clear_up

EXPERIMENT = "refrain evaluations"
"""In MLflow."""
EVALUATION_FILE = "evaluation.json"


@asynccontextmanager
async def open_evaluation(
    config: TrainConfig, policy_version: int, resume: bool
) -> AsyncGenerator[Run]:
    """As `open_run`, with neither trainer nor drafters.

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
        run = _make_run(config, inputs, policy_version, num_gpus, progress, pages)
        stack.push_async_callback(run.coordinator.shutdown)
        stack.push_async_callback(run.scorers.shutdown)
        stack.enter_context(made_current(run))
        await asyncio.gather(run.coordinator.start(), run.scorers.start())
        yield run


def end_cancelled_evaluation(config: TrainConfig) -> None:
    """As `end_cancelled`."""
    if clear_up(config.run_dir):
        mark_killed(config, os.environ.get("MLFLOW_TRACKING_URI"), config.runs_dir.parent)


def _make_run(
    config: TrainConfig,
    inputs: Inputs,
    policy_version: int,
    num_gpus: int,
    progress: Progress,
    pages: StepPages,
) -> Run:
    """Nothing of it is started but the store."""
    gpus = config.rollout.tp_degree if num_gpus else 0
    engines = [
        RayEngine(index, config.engine, gpus, engine_class=CheckpointEngine)
        for index in range(config.rollout.num_engines)
    ]
    return Run(
        config,
        inputs,
        store=StoreClient(start_store(config.run_dir / STORE_FILE)),
        trainer=TrainerGroup(config),
        coordinator=Coordinator(engines, max_restarts=config.rollout.max_restarts),
        scorers=ScorerPool(config),
        history=HistoryWorkers(config.history_dir, config.drafting, progress.phase),
        drafters=Drafters((), engines, 0, progress.phase, num_gpus=0),
        tracker=Tracker(
            config,
            os.environ.get("MLFLOW_TRACKING_URI"),
            experiment=EXPERIMENT,
            runs_dir=config.runs_dir.parent,
        ),
        pages=pages,
        progress=progress,
        weights=PolicyWeights(policy_version, None, ()),
        engines=RolloutEngines(engines),
    )


@task(cache_policy=NO_CACHE)
async def report_evaluation(batch: RolloutBatch, rewarded: RewardedBatch) -> EvaluationReport:
    """Write an evaluation to its directory and to MLflow."""
    run = current_run()
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
