"""Orchestration: how long a step takes besides generating, scoring and training.

The bench runs steps with everything real except engines, trainer and scorer, which are in
`benchmarks.timed_stubs`: flow, tasks, coordinator, store, pages and pictures. Servers of Prefect
and MLflow run on this machine, each on SQLite. The overhead of a step is the time from the end of
the step before to its own end, minus the time in which engines generate. Its parts are

    prefect       the same flow with tasks that do nothing
    duckdb        calls to the store
    mlflow        calls that log something

The bench also measures work that runs beside the next step:

    timeline      drawing
    delivery      delivering to MLflow and Prefect

The first step of a size is a warm-up. Figures are medians of the others.
"""

import asyncio
import contextlib
import os
import socket
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from refrain.benchmarks.laps import Measured, Row
from refrain.engines.reports.tables import plain_table
from refrain.flows.auth import mlflow_login
from refrain.flows.ui import HOST, servers, use_servers
from refrain.schemas.bench import BenchReport

SIZES = (64, 1024, 8192)
PACKAGES = ("refrain", "prefect", "mlflow", "duckdb", "ray")
PARTS = ("prefect_s", "duckdb_s", "mlflow_s", "rest_s")
"""Parts of the overhead, which add up to it."""
BESIDE = ("timeline_s", "delivery_s")
"""Parts that run beside the next step."""
_COLUMNS = ("overhead_s", *PARTS, *BESIDE)
_NUM_TASKS = 7
"""Prefect tasks in an RL step's flow."""
SHORTEST_S = 3.0
"""Shortest time in seconds that engines generate in a step: real steps leave as much time for
pictures."""
Stretch = tuple[float, float]
"""Begin and end, by `time.perf_counter`."""


class Stopwatch:
    """Seconds by kind of work."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Stretch]] = defaultdict(list)

    @contextlib.contextmanager
    def timed(self, name: str) -> Generator[None]:
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.spans[name].append((started_s, time.perf_counter()))

    def timed_async(self, name: str, function: Callable[..., Awaitable]) -> Callable:
        async def call(*args: Any, **kwargs: Any) -> Any:
            with self.timed(name):
                return await function(*args, **kwargs)

        return call

    def seconds(self, name: str, *stretches: Stretch) -> float:
        """Return the seconds of this kind of work within these stretches."""
        return sum(
            max(0.0, min(end_s, high_s) - max(start_s, low_s))
            for start_s, end_s in self.spans[name]
            for low_s, high_s in stretches
        )


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=8, help="steps of each size (default: %(default)s)"
    )
    parser.add_argument(
        "--rollouts",
        default=",".join(map(str, SIZES)),
        help="rollouts of a step, one or more sizes (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens", type=int, default=256, help="longest response in tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--pace",
        type=float,
        default=1000.0,
        help=f"rollouts per second, fewer if a step would take less than {SHORTEST_S:.0f} s "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--no-ray",
        action="store_true",
        help="keep the store in this process, not in an actor of its own",
    )


def measure(args: Namespace, console: Console) -> Measured:
    sizes = [int(size) for size in args.rollouts.split(",")]
    if args.steps < 2 or any(size < 64 or size % 8 for size in sizes):
        raise ValueError("--steps is at least 2, --rollouts are multiples of 8 from 64 on")
    ports = free_port(), free_port()
    with tempfile.TemporaryDirectory() as name:
        use_servers(Path(name), ports[0])
        os.environ |= mlflow_login()
        with servers(Path(name), *ports):
            uri = f"http://{HOST}:{ports[1]}"
            rows = asyncio.run(_measure(args, sizes, Path(name), uri, console))
    figures = {f"{name}_{row['rollouts']}": row[name] for row in rows for name in _COLUMNS}
    figures["overhead_growth"] = rows[-1]["overhead_s"] / rows[0]["overhead_s"]
    return figures, rows


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("rollouts", *(name.removesuffix("_s") for name in _COLUMNS))
    for row in report.rows:
        table.add_row(f"{row['rollouts']:,}", *(f"{row[name]:.3f}" for name in _COLUMNS))
    console.print(table)
    console.print(
        f"seconds a step; {report.rows[-1]['rollouts']:,} rollouts take "
        f"{report.figures['overhead_growth']:.2f} times as long as {report.rows[0]['rollouts']:,}"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


async def _measure(
    args: Namespace, sizes: Sequence[int], directory: Path, tracking_uri: str, console: Console
) -> list[Row]:
    from refrain.tasks.run.ray_cluster import ray_cluster

    rows = []
    nothing = contextlib.nullcontext()
    with nothing if args.no_ray else ray_cluster("overhead"):
        prefect_s = await _prefect_s(args.steps)
        for size in sizes:
            steps = await _steps(args, size, directory, tracking_uri)
            row = {name: median(step[name] for step in steps[1:]) for name in steps[0]}
            row["prefect_s"] = prefect_s
            row["rest_s"] = row["overhead_s"] - sum(row[name] for name in PARTS[:-1])
            rows.append({"rollouts": size, "steps": args.steps - 1, **row})
            console.print(f"{size:,} rollouts: {row['overhead_s']:.2f} s a step")
    return rows


async def _prefect_s(num_steps: int) -> float:
    """Return the seconds of a step's flow whose tasks do nothing."""
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE

    @task(cache_policy=NO_CACHE)
    async def nothing(step: int) -> int:
        return step

    @flow
    async def hollow_step(step: int) -> None:
        for _ in range(_NUM_TASKS):
            await nothing(step)

    @flow
    async def hollow_steps() -> list[float]:
        seconds = []
        for step in range(num_steps + 1):
            started_s = time.perf_counter()
            await hollow_step(step)
            seconds.append(time.perf_counter() - started_s)
        return seconds[1:]

    return median(await hollow_steps())


async def _steps(
    args: Namespace, size: int, directory: Path, tracking_uri: str
) -> list[dict[str, float]]:
    from prefect import flow

    from refrain.benchmarks.stand_ins import made_up_config
    from refrain.benchmarks.timed_stubs import LocalStore, hollow_run
    from refrain.engines.store.actor import StoreClient, start_store
    from refrain.flows.train import take_steps
    from refrain.tasks.run.run_dir import STORE_FILE

    config = made_up_config(directory, f"hollow-{size}", size, args.tokens)
    config.run_dir.mkdir()
    path = config.run_dir / STORE_FILE
    store = LocalStore(path) if args.no_ray else StoreClient(start_store(path))

    @flow
    async def overhead() -> list[dict[str, float]]:
        pace = min(args.pace, size / SHORTEST_S)
        async with hollow_run(config, store, args.steps, pace, tracking_uri) as (live, engines):
            watch, committed = Stopwatch(), [time.perf_counter()]
            generating = _watch(live, engines, watch, committed)
            await take_steps(live)
            return [
                _figures(watch, *stretches)
                for stretches in zip(pairwise(committed), generating, strict=True)
            ]

    return await overhead()


def _figures(watch: Stopwatch, step: Stretch, generating: Stretch) -> dict[str, float]:
    """Return the figures of a step. `step` begins at the end of the step before."""
    around = ((step[0], generating[0]), (generating[1], step[1]))
    return {
        "overhead_s": sum(end_s - start_s for start_s, end_s in around),
        "duckdb_s": watch.seconds("store", *around),
        "mlflow_s": watch.seconds("log", *around),
        "timeline_s": watch.seconds("draw", step),
        "delivery_s": watch.seconds("deliver", step),
    }


def _watch(
    live: Any, engines: Sequence[Any], watch: Stopwatch, committed: list[float]
) -> Sequence[Stretch]:
    """Measure calls of the run with the stopwatch, and note when each step is committed. Return a
    sequence that receives the stretches in which its engines generate."""
    generating: list[Stretch] = []
    run, coordinator, milestone = live.run, live.engines.coordinator, live.milestones.committed
    roll_out, reach = coordinator.roll_out, milestone.reach

    def note_begin(*args: Any, **kwargs: Any) -> Any:
        generating.append((time.perf_counter(), 0.0))
        return roll_out(*args, **kwargs)

    async def note_end(step: int, left: None) -> None:
        generating[-1] = (generating[-1][0], max(engine.ended_s for engine in engines))
        committed.append(time.perf_counter())
        await reach(step, left)

    coordinator.roll_out, milestone.reach = note_begin, note_end
    tracker = run.tracker
    run.store = watch.timed_async("store", run.store)
    run.rows = watch.timed_async("store", run.rows)
    tracker._outbox.add = watch.timed("log")(tracker._outbox.add)
    tracker._log_drawing = watch.timed("draw")(tracker._log_drawing)
    for outbox in (tracker._outbox, run.pages._outbox):
        outbox._deliver = watch.timed("deliver")(outbox._deliver)
    return generating
