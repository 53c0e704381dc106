"""The start of a run: how long until it learns?

    check_s            `refrain train CONFIG --check`, a whole process
    services_s         `refrain train CONFIG`, until Prefect's server has its flow
    engines_s          until engines and trainer have started and rollouts begin
    first_rollout_s    until the first finished rollout is durable
    cpu_s              CPU seconds of all its processes until then

Figures are medians. The run writes progress.json once a second, so `first_rollout_s` may be up to a
second late.
"""

import json
import os
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
from rich.console import Console

from refrain.benchmarks.laps import Measured, Row, check_counts, median_of
from refrain.benchmarks.pipeline import printed_last
from refrain.engines.reports.tables import plain_table
from refrain.engines.tracking.progress_file import PROGRESS_FILE
from refrain.flows.ui import Service, service
from refrain.schemas.bench import BenchReport
from refrain.tasks.run.run_dir import clear_up

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = ("refrain-rl", "ray", "prefect", "torch", "transformers", "vllm")
MEASURED = ("check_s", "services_s", "engines_s", "first_rollout_s", "cpu_s")
TIMEOUT_S = 900.0
"""Longest time for a command."""
POLL_S = 0.1
_ELSEWHERE = ("RAY_ADDRESS", "PREFECT_API_URL", "MLFLOW_TRACKING_URI")
"""Environment variables that name servers which already run."""
_KINDS = {
    "refrain.flows.cli": "driver",
    "uvicorn": "Prefect's server",
    "VLLM::": "vLLM's processes",
    "ray::VLLMEngine": "engine actors",
    "ray::TrainerActor": "trainer",
    "ray::RewardActor": "scorer",
    "ray::": "other actors",
}
"""Kinds of a run's processes, by words in their command lines. All others are Ray's own."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--config", default="infra/demo/train.yaml", help="config of the run (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: %(default)s)")


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "rounds")
    command, rows = Command(args.config), []
    for _ in range(args.rounds):
        rows.append(command.start())
        console.print(f"first rollout after {rows[-1]['first_rollout_s']:.1f} s")
    return {name: median_of(rows, name) for name in MEASURED}, rows


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("figure", "seconds")
    for name in MEASURED:
        table.add_row(name, f"{report.figures[name]:.1f}")
    console.print(table)


class Command:
    """`refrain train` of this checkout."""

    def __init__(self, config: str) -> None:
        """Raise ValueError if there is no such config."""
        if not (CHECKOUT / config).exists():
            raise ValueError(f"{CHECKOUT / config} does not exist: give the path of a config")
        self._command = [sys.executable, "-m", "refrain.flows.cli", "train", config]
        self._environment = {k: v for k, v in os.environ.items() if k not in _ELSEWHERE}
        self._environment["PYTHONPATH"] = str(CHECKOUT)

    def start(self) -> Row:
        """Check the config, then run until the first rollout. Return what `MEASURED` names, and CPU
        seconds by kind of process."""
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            try:
                started_s = time.perf_counter()
                with self._running(directory, "--check") as check:
                    if status := check.process.wait(TIMEOUT_S):
                        raise RuntimeError(f"--check ended with status {status}")
                    check_s = time.perf_counter() - started_s
                with self._running(directory) as run:
                    return {"check_s": check_s, **_until_first_rollout(run, directory)}
            except RuntimeError as error:
                last = printed_last(directory / "output")
                raise RuntimeError(f"{error}: {last}") from error
            finally:
                clear_up(directory / "start")

    def _running(self, directory: Path, *more: str) -> AbstractContextManager[Service]:
        return service(
            "refrain train",
            [*self._command, *more, f"runs_dir={directory}", "name=start"],
            directory / "output",
            cwd=CHECKOUT,
            env=self._environment,
        )


def _until_first_rollout(run: Service, directory: Path) -> Row:
    started_s = time.perf_counter()
    cpu_s: dict[tuple[int, float], tuple[str, float]] = {}
    reached_s: dict[str, float] = {}
    file = directory / "start" / PROGRESS_FILE
    while (now_s := time.perf_counter() - started_s) < TIMEOUT_S:
        _note_cpu(run.process.pid, cpu_s)
        if file.exists():
            reached_s.setdefault("services_s", now_s)
            if rolling := json.loads(file.read_bytes())["rolling"]:
                reached_s.setdefault("engines_s", now_s)
                if rolling["num_finished"]:
                    return {**reached_s, "first_rollout_s": now_s, **_by_kind(cpu_s.values())}
        if (status := run.process.poll()) is not None:
            raise RuntimeError(f"ended with status {status} before a rollout had")
        time.sleep(POLL_S)
    raise RuntimeError(f"no rollout in {TIMEOUT_S:.0f} s")


def _by_kind(used: Iterable[tuple[str, float]]) -> Row:
    kinds = Counter[str]()
    for kind, seconds in used:
        kinds[kind] += seconds
    by_process = {kind: round(seconds, 2) for kind, seconds in kinds.most_common()}
    return {"cpu_s": kinds.total(), "cpu_by_process_s": by_process}


def _note_cpu(pid: int, cpu_s: dict[tuple[int, float], tuple[str, float]]) -> None:
    """Update the CPU seconds of each process of the run: (process, its birth) -> (kind, CPU
    seconds)."""
    try:
        driver = psutil.Process(pid)
        processes = [driver, *driver.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            used, line = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        kind = next((kind for sign, kind in _KINDS.items() if sign in line), "Ray's own")
        cpu_s[process.pid, process.create_time()] = (kind, used.user + used.system)
