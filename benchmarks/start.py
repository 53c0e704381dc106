"""The start of a run: what passes before anything is learned.

    check_s            `refrain train CONFIG --check`, a whole process
    services_s         `refrain train CONFIG`, until Prefect's server has its flow
    engines_s          until engines and trainer are up and rollouts begin
    first_rollout_s    until the first finished rollout is durable
    cpu_s              of all its processes until then

With --beside, another checkout, which has a .venv of its own, does the same in turn, so that both
meet the same load of the machine. The medians count. When a rollout has finished is read from the
run's progress.json, which is written once a second: so much late it may be.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console

from engines.inference.profiling.engine import vllm_version
from engines.reports.tables import plain_table
from engines.tracking.progress_file import PROGRESS_FILE
from schemas.bench import BenchReport
from tasks.run.run_dir import clear_up

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = ("refrain", "ray", "prefect", "torch", "transformers")
MEASURED = ("check_s", "services_s", "engines_s", "first_rollout_s", "cpu_s")
TIMEOUT_S = 900.0
"""Longest time for a command."""
POLL_S = 0.1
_ELSEWHERE = ("RAY_ADDRESS", "PREFECT_API_URL", "MLFLOW_TRACKING_URI")
"""Environment variables that name servers, which would be started already."""
_KINDS = {
    "flows.cli": "driver",
    "uvicorn": "Prefect's server",
    "VLLM::": "vLLM's processes",
    "ray::VLLMEngine": "engine actors",
    "ray::TrainerActor": "trainer",
    "ray::RewardActor": "scorer",
    "ray::": "other actors",
}
"""Kinds of a run's processes, by what their command lines hold; the others are Ray's own."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--config", default="infra/demo/train.yaml", help="of the run (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each (default: %(default)s)")
    parser.add_argument("--beside", type=Path, metavar="DIR", help="another checkout, in turn")


def measure(args: Namespace, console: Console) -> BenchReport:
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: give at least 1")
    commands = {"now": Command(CHECKOUT, Path(sys.executable), args.config)}
    if args.beside:
        beside = args.beside.resolve()
        commands["before"] = Command(beside, beside / ".venv/bin/python", args.config)
    rows = []
    for _ in range(args.rounds):
        for name, command in commands.items():
            rows.append({"checkout": name, **command.start()})
            console.print(f"{name}: first rollout after {rows[-1]['first_rollout_s']:.1f} s")
    return BenchReport(
        name="start",
        figures=_figures(rows),
        rows=tuple(rows),
        command=args.command,
        versions={name: version(name) for name in PACKAGES} | {"vllm": vllm_version()},
    )


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("seconds", *{str(row["checkout"]): None for row in report.rows})
    names = {row["checkout"]: "" if row["checkout"] == "now" else "_before" for row in report.rows}
    for name in MEASURED:
        table.add_row(name, *(f"{report.figures[name + end]:.1f}" for end in names.values()))
    console.print(table)


class Command:
    """`refrain train` of a checkout."""

    def __init__(self, checkout: Path, python: Path, config: str) -> None:
        """Raises ValueError when there is no such checkout."""
        for needed in (python, checkout / config):
            if not needed.exists():
                raise ValueError(f"{needed} does not exist: give a checkout that was set up")
        self._command = [str(python), "-m", "flows.cli", "train", config]
        self._checkout = checkout
        self._environment = {k: v for k, v in os.environ.items() if k not in _ELSEWHERE}
        self._environment["PYTHONPATH"] = str(checkout)

    def start(self) -> dict[str, Any]:
        """Check, then run until the first rollout; what `MEASURED` names, and CPU seconds by kind
        of process."""
        with tempfile.TemporaryDirectory() as name, Path(name, "output").open("w+") as output:
            directory = Path(name)
            started_s = time.perf_counter()
            check = self._run(directory, output, "--check")
            status = check.wait(TIMEOUT_S)
            check_s = time.perf_counter() - started_s
            if status:
                output.seek(0)
                raise RuntimeError(f"--check fails in {self._checkout}: {output.read()[-2000:]}")
            process = self._run(directory, output)
            try:
                return {"check_s": check_s, **_until_first_rollout(process, directory)}
            except RuntimeError as error:
                output.seek(0)
                raise RuntimeError(f"{self._checkout}: {error}: {output.read()[-2000:]}") from error
            finally:
                _stop(process)
                clear_up(directory / "start")

    def _run(self, directory: Path, output: Any, *more: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*self._command, *more, f"runs_dir={directory}", "name=start"],
            cwd=self._checkout,
            env=self._environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _until_first_rollout(process: subprocess.Popen, directory: Path) -> dict[str, Any]:
    started_s, cpu_s, reached_s = time.perf_counter(), {}, {}
    while (now_s := time.perf_counter() - started_s) < TIMEOUT_S:
        _note_cpu(process.pid, cpu_s)
        progress = _read(directory / "start" / PROGRESS_FILE)
        rolling = progress and progress["rolling"]
        if progress:
            reached_s.setdefault("services_s", now_s)
        if rolling:
            reached_s.setdefault("engines_s", now_s)
        if rolling and rolling["num_finished"]:
            kinds = Counter[str]()
            for kind, seconds in cpu_s.values():
                kinds[kind] += seconds
            return {
                **reached_s,
                "first_rollout_s": now_s,
                "cpu_s": kinds.total(),
                "cpu_by_process_s": {kind: round(s, 2) for kind, s in kinds.most_common()},
            }
        if process.poll() is not None:
            raise RuntimeError(f"ended with status {process.returncode} before a rollout had")
        time.sleep(POLL_S)
    raise RuntimeError(f"no rollout in {TIMEOUT_S:.0f} s")


def _read(file: Path) -> dict[str, Any] | None:
    # Another version's is not this one's `RunProgress`.
    return json.loads(file.read_bytes()) if file.exists() else None


def _note_cpu(pid: int, cpu_s: dict[tuple[int, float], tuple[str, float]]) -> None:
    """Take in what each process of the run has used so far: (process, its birth) -> (kind, CPU
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


def _stop(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(120.0)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians, and how many times as long it took before."""

    def medians(checkout: str, end: str) -> dict[str, float]:
        chosen = [row for row in rows if row["checkout"] == checkout]
        return {name + end: median(row[name] for row in chosen) for name in MEASURED if chosen}

    figures = medians("now", "") | medians("before", "_before")
    ratios = {
        f"{name}_ratio": figures[f"{name}_before"] / figures[name]
        for name in MEASURED
        if f"{name}_before" in figures
    }
    return figures | ratios
