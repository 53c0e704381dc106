"""A long run: does a late step cost as much as an early one?

Engines that make up tokens, and a trainer and a scorer that do nothing, replace the real ones.
Tasks, coordinator, store, MLflow and pictures are real; Prefect is left out. The bench measures
stretches of steps:

    query_s          seconds per step in which the driver waits for the store
    memory_bytes     resident memory of the driver, at the end
    files            files of the run and of MLflow that a step adds
    database_bytes   size of the store's database at the end, without what it has archived

Figures compare the last stretch with the second. The first one loads libraries.
"""

import asyncio
import gc
import os
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from rich.console import Console

from refrain.benchmarks.laps import Measured, Row
from refrain.engines.reports.tables import plain_table
from refrain.schemas.bench import BenchReport

PACKAGES = ("refrain", "ray", "duckdb", "mlflow")
MEASURED = ("query_s", "memory_bytes", "files", "database_bytes", "step_s")
NUM_STRETCHES = 10
_PACE = 10_000.0
"""Rollouts per second."""
_TIMEOUT_S = 120.0
"""Longest time of a step."""


class NoPages:
    """Pages of steps that nobody reads."""

    def add(self, *_: Any) -> None: ...

    def close(self) -> None: ...


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=2000, metavar="N", help="steps of the run [default: 2000]"
    )
    parser.add_argument(
        "--rollouts", type=int, default=64, metavar="N", help="rollouts of each step [default: 64]"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=256,
        metavar="N",
        help="longest response in tokens [default: 256]",
    )
    parser.add_argument(
        "--no-ray",
        action="store_true",
        help="keep the store in this process, not in an actor of its own",
    )


def measure(args: Namespace, console: Console) -> Measured:
    if args.steps < 2 * NUM_STRETCHES or args.steps % NUM_STRETCHES or args.rollouts % 8:
        raise ValueError(
            f"--steps is a multiple of {NUM_STRETCHES} from {2 * NUM_STRETCHES} on, --rollouts one "
            f"of 8: not {args.steps} and {args.rollouts}"
        )
    from prefect.settings import PREFECT_API_URL, temporary_settings

    nowhere = temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"})
    with nowhere, TemporaryDirectory(prefix="refrain-bench-") as directory:
        rows = asyncio.run(_measure(args, Path(directory), console))
    early, late = rows[1], rows[-1]
    return {f"{name}_growth": late[name] / early[name] for name in MEASURED}, rows


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("steps to", "store, ms", "driver, MB", "files a step", "database, MB")
    for row in report.rows:
        values = (1e3 * row["query_s"], row["memory_bytes"] / 1e6, row["files"])
        megabytes = row["database_bytes"] / 1e6
        table.add_row(str(row["step"]), *(f"{value:.1f}" for value in (*values, megabytes)))
    console.print(table)
    growth = ", ".join(f"{name} {report.figures[f'{name}_growth']:.2f}" for name in MEASURED)
    console.print(f"last stretch / second stretch: {growth}")


async def _measure(args: Namespace, directory: Path, console: Console) -> list[Row]:
    from contextlib import nullcontext

    from refrain.tasks.run.ray_cluster import ray_cluster

    with nullcontext() if args.no_ray else ray_cluster("growth"):
        return await _steps(args, directory, console)


async def _steps(args: Namespace, directory: Path, console: Console) -> list[Row]:
    from refrain.benchmarks.stand_ins import made_up_config
    from refrain.benchmarks.timed_stubs import LocalStore, hollow_run
    from refrain.engines.store.actor import StoreClient, start_store
    from refrain.tasks.run.run_dir import STORE_FILE

    config = made_up_config(directory, "growth", args.rollouts, args.tokens)
    config.run_dir.mkdir()
    path = config.run_dir / STORE_FILE
    store = LocalStore(path) if args.no_ray else StoreClient(start_store(path))
    rows: list[Row] = []
    async with hollow_run(config, store, args.steps, _PACE, None) as (live, _):
        live.run.pages = NoPages()
        queries = _timed(live.run)
        length, num_files = args.steps // NUM_STRETCHES, _num_files(directory)
        for first in range(1, args.steps + 1, length):
            seconds = []
            for step in range(first, first + length):
                queries.append(0.0)
                started_s = time.perf_counter()
                await asyncio.wait_for(_take_and_draw(live, step), _TIMEOUT_S)
                seconds.append(time.perf_counter() - started_s)
            await asyncio.to_thread(live.run.tracker.flush)
            before, num_files = num_files, _num_files(directory)
            gc.collect()
            row = {
                "step": first + length - 1,
                "query_s": median(queries[-length:]),
                "step_s": median(seconds),
                "memory_bytes": psutil.Process().memory_info().rss,
                "files": (num_files - before) / length,
                "database_bytes": sum(p.stat().st_size for p in path.parent.glob(f"{path.name}*")),
            }
            rows.append(row)
            console.print(f"step {row['step']}: {row['step_s']:.2f} s a step")
    return rows


async def _take_and_draw(live: Any, step: int) -> None:
    from refrain.tasks.report import draw_step

    await draw_step.fn(live.ref, *await take_step(live, step))


async def take_step(live: Any, step: int) -> tuple[Any, Any]:
    """Run the tasks of a step up to the drawing task, without their flow; return its report and
    batch."""
    from refrain.engines.gpus.gpu_sharing import Role
    from refrain.tasks.history import index_history
    from refrain.tasks.learn import save_checkpoint, train_policy
    from refrain.tasks.report import report_step
    from refrain.tasks.reward import reward
    from refrain.tasks.rollout import rollout
    from refrain.tasks.schedule import rank_and_group

    run, reached = live.ref, live.milestones
    history = await index_history.fn(run, step)
    plan = await rank_and_group.fn(run, step, history, live.engines.living)
    weights = await reached.published.left_by(plan.policy_version)
    async with live.engines.turns.of(Role.ENGINES):
        batch = await rollout.fn(run, plan, weights, live.engines)
    rewarded = await reward.fn(run, batch)
    async with live.engines.turns.of(Role.TRAINER):
        trained = await train_policy.fn(run, rewarded)
        await reached.published.reach(step, trained.weights)
        report = await report_step.fn(run, history, plan, batch, rewarded, trained, None)
        await save_checkpoint.fn(run, report)
    return report, batch


def _timed(run: Any) -> list[float]:
    """Measure the run's calls to its store. Each adds its seconds to the last item of the returned
    list."""
    seconds: list[float] = []

    def timed(call: Any) -> Any:
        async def measured(*args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return await call(*args, **kwargs)
            finally:
                seconds[-1] += time.perf_counter() - started_s

        return measured

    run.store, run.rows = timed(run.store), timed(run.rows)
    return seconds


def _num_files(directory: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(directory))
