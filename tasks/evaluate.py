"""An evaluation: a run that only validates, with a model from disk."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.accounting.metrics import evaluation_metrics, evaluation_report, validation_metrics
from engines.durable import write_durably
from engines.failures import Failures
from engines.histospec.workers import HistoryWorkers
from engines.inference.engine.checkpoint_engine import CheckpointEngine
from engines.learn.trainer import TrainerGroup
from engines.reports.progress import Everywhere, TerminalProgress
from engines.reward import ScorerPool
from engines.store.actor import StoreClient, start_store
from engines.tracking.tracker import Tracker, add_to_run
from schemas.base import with_absolute_paths
from schemas.evaluation import EvaluationReport
from schemas.run import RunRef
from schemas.step import RewardedBatch, RolloutBatch
from schemas.weights import PolicyWeights
from tasks.report import log_stage
from tasks.run.artifacts import StepPages
from tasks.run.attach import SCORER, STORE, Run, attach
from tasks.run.engines import make_generation
from tasks.run.environments import start_environments
from tasks.run.gpus import wanted_by_engines
from tasks.run.live import LiveRun, make_ref, recorded
from tasks.run.milestones import Milestones
from tasks.run.plan import RunPlan
from tasks.run.ray_cluster import ray_cluster, while_ray_lives
from tasks.run.run_dir import (
    claim_run_dir,
    delete_run,
    made_known,
    stop_leftovers,
)
from tasks.run.run_log import RunLog

EXPERIMENT = "refrain evaluations"
"""MLflow experiment of all evaluations."""
EVALUATION_FILE = "evaluation.json"


@asynccontextmanager
async def open_evaluation(plan: RunPlan, policy_version: int) -> AsyncGenerator[LiveRun]:
    """Open a run without trainer and drafters, like `open_run`, and close it after the block."""
    config, runs_dir = plan.config, plan.config.runs_dir.parent
    if plan.overwrites:
        delete_run(config.run_dir)
    async with AsyncExitStack() as stack:
        stack.callback(claim_run_dir(config, plan.resume).release)
        stack.callback(stop_leftovers, config.run_dir)
        terminal = TerminalProgress()
        stack.callback(terminal.close)
        failures = Failures(config.run_dir)
        stack.callback(failures.close)
        progress = Everywhere(failures, terminal, RunLog())
        failures.warn = progress.warn
        progress.phase("starting Ray and the engines")
        placement = stack.enter_context(ray_cluster(config.name, wanted_by_engines(config)))
        pages = StepPages(config.run_dir, config.name, failures)
        stack.callback(pages.close)
        engines = await make_generation(
            config, None, policy_version, placement, progress.phase, CheckpointEngine
        )
        stack.push_async_callback(engines.coordinator.shutdown)
        scorers = ScorerPool(config, SCORER)
        stack.push_async_callback(scorers.shutdown)
        store = StoreClient(start_store(plan.addresses.store, STORE))
        await start_environments(with_absolute_paths(config), stack, STORE)
        run = Run(
            make_ref(config, policy_version),
            config,
            plan.inputs,
            store,
            TrainerGroup(config),
            scorers,
            HistoryWorkers(config.history_dir, config.engine.drafting, progress.phase),
            Tracker(
                config, plan.addresses.mlflow, failures, experiment=EXPERIMENT, runs_dir=runs_dir
            ),
            pages,
            progress,
            failures,
        )
        stack.enter_context(made_known(run.ref))
        stack.enter_context(recorded(run))
        weights = PolicyWeights(policy_version, None, ())
        async with while_ray_lives("Continue the evaluation with --resume."):
            await asyncio.gather(engines.start(), scorers.start())
            yield LiveRun(run, engines, Milestones(weights, 0, policy_version, engines.queued))


@task(cache_policy=NO_CACHE)
async def report_evaluation(
    ref: RunRef, batch: RolloutBatch, rewarded: RewardedBatch
) -> EvaluationReport:
    """Write an evaluation's report to its directory and to MLflow."""
    run = attach(ref)
    rewards = await run.store("rewards", batch.split, batch.step)
    own = run.inputs.prompts_of(batch.split)
    sources = {key: prompt.data_source for key, prompt in own.items()}
    report = evaluation_report(run.config, batch, rewarded, rewards, sources)
    run.tracker.log_metrics(validation_metrics(rewarded, report.sources), batch.step)
    with run.failures.contained("showing an evaluation"):
        await log_stage(run, batch)
    write_durably(run.config.run_dir / EVALUATION_FILE, report.model_dump_json(indent=2) + "\n")
    return report


@task(cache_policy=NO_CACHE, retries=3, retry_delay_seconds=[2, 10, 60])
async def add_to_training_run(report: EvaluationReport, run_dir: Path) -> None:
    """Add the figures to the MLflow run of the checkpoint's run. Retry for about a minute if the
    server does not answer."""
    metrics = evaluation_metrics(report)
    add_to_run(run_dir, os.environ.get("MLFLOW_TRACKING_URI"), metrics, report.policy_version)
