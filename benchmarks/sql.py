"""Queries to a live run's store: how fast are the answers, and how much do they slow the run?

Engines make up tokens, and the store runs in its own process. In every other step the bench queries
the three views, one after the other, with pauses of half a second.

    answer_s   seconds from a query to its answer: median and longest
    slowdown   median time of steps with queries / median time of steps without
"""

import asyncio
import itertools
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console

from refrain.benchmarks.growth import NoPages, take_step
from refrain.benchmarks.laps import Measured, Row
from refrain.engines.reports.tables import plain_table
from refrain.schemas.bench import BenchReport

PACKAGES = ("refrain", "ray", "duckdb")
QUESTIONS = (
    "SELECT engine, drafter, avg(acceptance_rate) FROM acceptance GROUP BY ALL",
    "SELECT step, median(median_tokens) FROM lengths GROUP BY step ORDER BY step",
    "SELECT step, value FROM step_metrics WHERE name = 'critic/score/mean' ORDER BY step",
)
_PACE = 500.0
"""Rollouts per second."""
_PAUSE_S = 0.5
_TIMEOUT_S = 30.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=60, metavar="N", help="steps of the run [default: 60]"
    )
    parser.add_argument(
        "--rollouts",
        type=int,
        default=1024,
        metavar="N",
        help="rollouts of each step [default: 1024]",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=512,
        metavar="N",
        help="longest response in tokens [default: 512]",
    )


def measure(args: Namespace, console: Console) -> Measured:
    if args.steps < 4 or args.steps % 2 or args.rollouts % 8:
        raise ValueError(
            "--steps is an even number from 4 on, --rollouts a multiple of 8: not "
            f"{args.steps} and {args.rollouts}"
        )
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from refrain.tasks.run.ray_cluster import ray_cluster

    nowhere = temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"})
    with (
        nowhere,
        TemporaryDirectory(prefix="refrain-bench-") as directory,
        ray_cluster("sql"),
    ):
        rows = asyncio.run(_steps(args, Path(directory), console))
    return _figures(rows), rows


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("step", "seconds", "questions", "longest answer, s")
    for row in report.rows:
        longest = f"{row['answer_s']:.3f}" if row["num_questions"] else "-"
        table.add_row(str(row["step"]), f"{row['seconds']:.2f}", str(row["num_questions"]), longest)
    console.print(table)
    figures = report.figures
    console.print(
        f"answers: median {figures['answer_s']:.3f} s, longest {figures['longest_answer_s']:.3f} s;"
        f" steps with questions over those without: {figures['slowdown']:.3f}"
    )


def _figures(rows: list[Row]) -> dict[str, float]:
    # The first steps load libraries.
    warm = rows[2:]
    asked = [row for row in warm if row["num_questions"]]
    quiet = [row["seconds"] for row in warm if not row["num_questions"]]
    return {
        "answer_s": median(row["median_answer_s"] for row in asked),
        "longest_answer_s": max(row["answer_s"] for row in asked),
        "slowdown": median(row["seconds"] for row in asked) / median(quiet),
    }


async def _steps(args: Namespace, directory: Path, console: Console) -> list[Row]:
    from refrain.benchmarks.stand_ins import made_up_config
    from refrain.benchmarks.timed_stubs import hollow_run
    from refrain.engines.store.actor import StoreClient, start_store
    from refrain.tasks.run.run_dir import STORE_FILE

    config = made_up_config(directory, "sql", args.rollouts, args.tokens)
    config.run_dir.mkdir()
    store = StoreClient(start_store(config.run_dir / STORE_FILE))
    rows: list[Row] = []
    async with hollow_run(config, store, args.steps, _PACE, None) as (live, _):
        live.run.pages = NoPages()
        for step in range(1, args.steps + 1):
            answers: list[float] = []
            started_s = time.perf_counter()
            with _asking(config.run_dir, answers) if step % 2 == 0 else nullcontext():
                await take_step(live, step)
                seconds = time.perf_counter() - started_s
            row = {
                "step": step,
                "seconds": seconds,
                "num_questions": len(answers),
                "answer_s": max(answers, default=0.0),
                "median_answer_s": median(answers) if answers else 0.0,
            }
            rows.append(row)
            if step % 10 == 0:
                console.print(f"step {step}/{args.steps}")
    return rows


@contextmanager
def _asking(run_dir: Path, answers: list[float]) -> Iterator[None]:
    """Send queries while this lasts; `answers` receives the seconds of each."""
    from refrain.tasks.run.store_query import query_run

    over = threading.Event()
    failed: list[Exception] = []

    def ask() -> None:
        for question in itertools.cycle(QUESTIONS):
            started_s = time.perf_counter()
            try:
                query_run(run_dir, question, _TIMEOUT_S)
            except Exception as error:
                failed.append(error)
                return
            answers.append(time.perf_counter() - started_s)
            if over.wait(_PAUSE_S):
                return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failed:
        raise failed[0]
