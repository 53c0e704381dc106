"""An evaluation: a run that only validates, with a model from disk."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from refrain.engines.accounting.metrics import (
    evaluation_metrics,
    evaluation_report,
    validation_metrics,
)
from refrain.engines.durable import write_durably
from refrain.engines.failures import Failures
from refrain.engines.histospec.workers import HistoryWorkers
from refrain.engines.inference.engine.checkpoint_engine import CheckpointEngine
from refrain.engines.learn.trainer import TrainerGroup
from refrain.engines.reports.progress import Everywhere, TerminalProgress
from refrain.engines.reward import ScorerPool
from refrain.engines.store.actor import StoreClient, start_store
from refrain.engines.tracking.tracker import Tracker, add_to_run
from refrain.schemas.base import with_absolute_paths
from refrain.schemas.evaluation import EvaluationReport
from refrain.schemas.run import RunRef
from refrain.schemas.step import RewardedBatch, RolloutBatch
from refrain.schemas.weights import PolicyWeights
from refrain.tasks.report import log_stage
from refrain.tasks.run.artifacts import StepPages
from refrain.tasks.run.attach import SCORER, STORE, Run, attach
from refrain.tasks.run.engines import make_generation
from refrain.tasks.run.environments import start_environments
from refrain.tasks.run.gpus import wanted_by_engines
from refrain.tasks.run.live import LiveRun, make_ref, recorded
from refrain.tasks.run.milestones import Milestones
from refrain.tasks.run.plan import RunPlan
from refrain.tasks.run.ray_cluster import ray_cluster, while_ray_lives
from refrain.tasks.run.run_dir import (
    claim_run_dir,
    delete_run,
    made_known,
    stop_leftovers,
)
from refrain.tasks.run.run_log import RunLog

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
        await start_environments(with_absolute_paths(config), stack, placement, STORE)
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
