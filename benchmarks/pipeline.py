"""Train end to end in several modes: rollouts, rewards, training and checkpoints of real runs.

    refrain bench pipeline --engines 2,4 --json benchmarks/baselines/pipeline.json
    refrain bench pipeline --modes sync,queue --set algorithm.type=dapo

    sync        every step waits for the one before
    pipelined   engines generate the next step while this one is trained on
    histopipe   pipelined, with prompts ranked by length and long responses moved
    queue       pipelined, with responses that wait in one queue
    queue_0     from one queue, with a staleness of 0; so, too, queue_2 and queue_4

A lap runs `refrain train CONFIG` for each number of engines and each mode. Every run has a process
and a directory of its own. The mode that comes first changes from lap to lap. The bench changes
only four things in CONFIG: staleness and placement, the engines, the epochs, and validation, which
happens before the first step and after the last. Figures are medians over laps. Ratios are ratios
of medians.

If CONFIG sets the trainer's threads, the trainer of a pipelined run has one thread, as it shares
the cores with the engines.

Measurement begins at the end of the first epoch, which has start-up and prompts without history. It
ends at the end of the last step but one. It counts wall time, including checkpoints and waits
between steps, which a step's own seconds leave out in `sync`. A step ends when it is reported. In a
pipelined run another step is in progress at both ends.

    samples per second   samples that were trained on / measured seconds
    idle share           1 - seconds in which engines had requests / (engines x measured seconds)

Only engine seconds for samples that the measured steps trained on count. An idle engine waits for
training, for other engines or for weights. If engines and trainer share cores, they slow each other
down, so engines are busy for longer.

    cores busy           CPU seconds of all processes / (measured seconds x cores)

If all cores are busy in `sync`, overlap can gain no more than the idle rest. With `--split-cores`
the trainer has one half of the cores in every mode, and everything else has the other half. On GPUs
each would have cards of its own.

Each lap has a seed of its own, the same for all modes. The modes sample with different policy
versions, so their responses differ. Rows therefore have the mean length and the reward of the last
validation.
"""

import os
import shlex
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from rich.console import Console

from refrain.benchmarks.cores import CoreWatch, halves, only
from refrain.benchmarks.laps import Measured, Row, check_counts, in_turn, median_of, rows_with
from refrain.benchmarks.one_step import add_config
from refrain.engines.reports.tables import plain_table
from refrain.engines.store.store import Store
from refrain.flows.config_file import load_config
from refrain.flows.ui import service
from refrain.schemas.bench import BenchReport
from refrain.schemas.rollout import Split
from refrain.schemas.step import RunSummary, StepReport
from refrain.tasks.run.run_dir import STORE_FILE, SUMMARY_FILE

MODES = {
    "sync": ("staleness=0", "rollout.placement=histopipe"),
    "pipelined": ("staleness=1", "rollout.placement=even"),
    "histopipe": ("staleness=1", "rollout.placement=histopipe"),
    "queue": ("staleness=1", "rollout.placement=queue"),
    "queue_0": ("staleness=0", "rollout.placement=queue"),
    "queue_2": ("staleness=2", "rollout.placement=queue"),
    "queue_4": ("staleness=4", "rollout.placement=queue", "algorithm.tis_cap=2"),
}
COMPARED = ("sync", "pipelined", "histopipe", "queue")
"""Modes that are compared by default."""
ONE_THREAD = ("trainer.num_threads=1",)
"""Override for the trainer of a pipelined run if CONFIG sets its threads, which is on a CPU. There
it shares the cores with engines that always have work. In `sync` it has them to itself."""
COMMAND = (sys.executable, "-m", "refrain.flows.cli", "train")
COLUMNS = ("engines", "mode", "samples/s", "speedup", "idle", "cores", "s/step", "migrated")
COLUMNS += ("deferred", "tokens", "reward")
PHASES = ("history", "sync", "rollout", "reward", "train")
NAME = "bench"
NUM_LAST_LINES = 20
"""Lines of output to show if a run fails."""
LOCK_TIMEOUT_S = 60.0
PACKAGES = ("refrain-rl", "torch", "ray", "prefect", "duckdb", "vllm")


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser, "infra/demo/train.yaml")
    parser.add_argument(
        "--engines",
        default="2,4",
        metavar="LIST",
        help="numbers of engines to compare [default: 2,4]",
    )
    parser.add_argument(
        "--laps",
        type=int,
        default=3,
        metavar="N",
        help="laps over all engines and modes [default: 3]",
    )
    parser.add_argument(
        "--epochs", type=int, default=4, metavar="N", help="epochs of a run [default: 4]"
    )
    modes = ",".join(COMPARED)
    parser.add_argument(
        "--modes", default=modes, metavar="LIST", help=f"modes to compare [default: {modes}]"
    )
    parser.add_argument(
        "--split-cores", action="store_true", help="reserve half of the cores for the trainer"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings for all runs"
    )


def measure(args: Namespace, console: Console) -> Measured:
    counts, modes = _counts(args.engines), _modes(args.modes)
    _check(args, counts, modes)
    rows: list[Row] = []
    orders = [in_turn(modes, lap) for lap in range(args.laps)]
    runs = [(lap, n, mode) for lap in range(args.laps) for n in counts for mode in orders[lap]]
    for lap, num_engines, mode in runs:
        row: Row = {
            "lap": lap + 1,
            "seed": lap,
            "engines": num_engines,
            "mode": mode,
            "mode_order": orders[lap],
        }
        given = (args.config, mode, num_engines, args.epochs, args.set)
        rows.append(row | run_once(*given, seed=lap, split_cores=args.split_cores))
        console.print(progress(rows, len(runs), args.laps), soft_wrap=True)
    return figures(rows, counts), rows


def show(report: BenchReport, console: Console) -> None:
    """Print medians over laps, with tokens per response and reward of the last validation."""
    table = plain_table(*COLUMNS, text=("mode",), gap=1)
    for num_engines in dict.fromkeys(row["engines"] for row in report.rows):
        own = rows_with(report.rows, engines=num_engines)
        for mode in _measured(own):
            table.add_row(str(num_engines), mode, *_cells(own, mode))
    console.print(table)


def overrides(
    mode: str,
    num_engines: int,
    num_epochs: int,
    seed: int = 0,
    *,
    shares_cores: bool = False,
    split_cores: bool = False,
) -> tuple[str, ...]:
    """Return the overrides of a run. Index files go into its own directory, to hide them from other
    laps."""
    given = f"name={NAME} seed={seed} num_epochs={num_epochs} rollout.num_engines={num_engines}"
    fixed = "validate_every_steps=0 drafting.index_dir=null"
    overlaps = "staleness=0" not in MODES[mode]
    threads = ONE_THREAD if shares_cores and (overlaps or split_cores) else ()
    return (*MODES[mode], *threads, *given.split(), *fixed.split())


def run_once(
    config: Path,
    mode: str,
    num_engines: int,
    num_epochs: int,
    settings: Sequence[str],
    seed: int,
    *,
    split_cores: bool,
) -> Row:
    """Run once from start to end. Raise RuntimeError with its last output if it fails."""
    cores = {
        "shares_cores": load_config(config).trainer.num_threads is not None,
        "split_cores": split_cores,
    }
    given = overrides(mode, num_engines, num_epochs, seed, **cores)
    started_s, load = time.perf_counter(), os.getloadavg()[0]
    with TemporaryDirectory(prefix="refrain-bench-", ignore_cleanup_errors=True) as directory:
        command = [*COMMAND, str(config), *given, *settings, f"runs_dir={directory}"]
        watch = run_command(command, Path(directory), split_cores=split_cores)
        wall_s = time.perf_counter() - started_s
        row = read_run(Path(directory, NAME), num_engines, watch)
    return row | {"load_at_start": load, "process_s": wall_s}


def run_command(command: Sequence[str], directory: Path, *, split_cores: bool = False) -> CoreWatch:
    """Run a command; return the cores that it used. Raise RuntimeError if it fails. When this
    process stops, so does the command with all its children."""
    output = directory / "output.txt"
    others, trainers = halves() if split_cores else (os.sched_getaffinity(0), None)
    with (
        only(others),
        service("a run", command, output) as run,
        CoreWatch(run.process.pid, trainers) as watch,
    ):
        code = run.process.wait()
    if code:
        what = f"{shlex.join(command)} ended with {code}"
        raise RuntimeError(f"{what}; it printed last:\n{printed_last(output)}")
    return watch


def printed_last(output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
    return "\n".join(lines) or "(nothing)"


def read_run(run_dir: Path, num_engines: int, watch: CoreWatch) -> Row:
    """Return the row of a run, from its store, its summary and the cores that it used."""
    summary = RunSummary.model_validate_json((run_dir / SUMMARY_FILE).read_text())
    with Store(run_dir / STORE_FILE, read_only=True, lock_timeout_s=LOCK_TIMEOUT_S) as store:
        steps = store.steps()
        plans = {report.step: store.plan(Split.TRAIN, report.step) for report in steps}
        column = "response_tokens"
        lengths = {
            step: store.rollouts(Split.TRAIN, step, (column,))[column].to_pylist() for step in plans
        }
    planned_s = {step: plan.created_s for step, plan in plans.items() if plan}
    row = stretch_row(steps, planned_s, lengths, num_engines)
    start_s, end_s = stretch(steps, planned_s)
    busy = watch.used_s(start_s, end_s) / ((end_s - start_s) * len(os.sched_getaffinity(0)))
    return row | {"cores_busy": busy, "validation_last": summary.validation_last}


def stretch_row(
    steps: Sequence[StepReport],
    planned_s: Mapping[int, float],
    lengths: Mapping[int, Sequence[int]],
    num_engines: int,
) -> Row:
    """Return the row of all steps after the first epoch, without the last step. `planned_s`: Unix
    time at which each step was planned; `lengths`: tokens of each response that it trained on."""
    start_s, end_s = stretch(steps, planned_s)
    own, stretch_s = _counted(steps), end_s - start_s
    trained = [length for report in own for length in lengths[report.step]]
    busy_s = sum(report.metrics["rollout/busy_s"] for report in own)
    return {
        "samples_per_s": len(trained) / stretch_s,
        "idle_share": 1.0 - busy_s / (num_engines * stretch_s),
        "step_s": stretch_s / len(own),
        "stretch_s": stretch_s,
        "num_steps": len(own),
        "num_samples": len(trained),
        "mean_response_tokens": fmean(trained),
        "busy_s": busy_s,
        **{f"{phase}_s": sum(r.timing_s[phase] for r in own) for phase in PHASES},
        "num_migrated": int(sum(report.metrics["rollout/num_migrated"] for report in own)),
        "num_deferred": int(sum(report.metrics["rollout/num_deferred"] for report in own)),
    }


def stretch(steps: Sequence[StepReport], planned_s: Mapping[int, float]) -> tuple[float, float]:
    """Return the Unix times at which measurement began and ended. `planned_s`: as for
    `stretch_row`."""
    own, ends_s = _counted(steps), end_times(steps, planned_s)
    return ends_s[own[0].step - 1], ends_s[own[-1].step]


def _counted(steps: Sequence[StepReport]) -> list[StepReport]:
    return [report for report in steps[:-1] if report.epoch > steps[0].epoch]


def end_times(steps: Sequence[StepReport], planned_s: Mapping[int, float]) -> dict[int, float]:
    """Return the Unix time at which each step was reported. See
    `engines.accounting.metrics.step_report`."""
    ends_s: dict[int, float] = {}
    for report in steps:
        began_s = max(planned_s[report.step], ends_s.get(report.step - 1, 0.0))
        ends_s[report.step] = began_s + report.timing_s["step"]
    return ends_s


def figures(rows: Sequence[Row], counts: Sequence[int]) -> dict[str, float]:
    """Return figures. Those of the first number of engines also have short names."""
    by_count = {n: _figures(rows_with(rows, engines=n)) for n in counts}
    return by_count[counts[0]] | {
        f"{name}_{n}_engines": value
        for n, values in by_count.items()
        for name, value in values.items()
    }


def progress(rows: Sequence[Row], num_runs: int, num_laps: int) -> str:
    """Return a line about the last run."""
    row, num_left = rows[-1], num_runs - len(rows)
    left_s = num_left * fmean(row["process_s"] for row in rows)
    return (
        f"lap {row['lap']}/{num_laps}, {row['engines']} engines, {row['mode']}: "
        f"{row['samples_per_s']:.1f} samples/s, {row['idle_share']:.0%} idle, "
        f"in {row['process_s']:.0f} s; {num_left} runs left, about {left_s / 60:.0f} minutes"
    )


def _counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"--engines: {text!r} must list numbers, for example 2,4") from None
    if min(counts) < 1:
        raise ValueError(f"--engines {text}: give at least 1 each")
    return list(dict.fromkeys(counts))


def _modes(text: str) -> list[str]:
    names = text.split(",")
    if "sync" not in names or not set(names) <= set(MODES):
        raise ValueError(
            f"--modes {text}: give sync, and what to compare it with of {', '.join(MODES)}"
        )
    return [mode for mode in MODES if mode in names]


def _measured(rows: Sequence[Row]) -> list[str]:
    return [mode for mode in MODES if rows_with(rows, mode=mode)]


def _check(args: Namespace, counts: Sequence[int], modes: Sequence[str]) -> None:
    """Raise ValueError for arguments that would otherwise fail late."""
    check_counts(args, "laps")
    if args.split_cores:
        halves()
    if args.epochs < 2:
        raise ValueError(f"--epochs {args.epochs}: give at least 2: the first one is the warm-up")
    for mode, num_engines in product(modes, counts):
        load_config(args.config, (*overrides(mode, num_engines, args.epochs), *args.set))


def _figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the figures of one number of engines."""
    modes = _measured(rows)
    speeds = {mode: median_of(rows, "samples_per_s", mode=mode) for mode in modes}
    return {
        "sync_samples_per_s": speeds["sync"],
        **{f"{mode}_speedup": speeds[mode] / speeds["sync"] for mode in modes if mode != "sync"},
        **{f"idle_share_{mode}": median_of(rows, "idle_share", mode=mode) for mode in modes},
        **{f"cores_busy_{mode}": median_of(rows, "cores_busy", mode=mode) for mode in modes},
    }


def _cells(rows: Sequence[Row], mode: str) -> Iterator[str]:
    own = rows_with(rows, mode=mode)
    speed = median_of(own, "samples_per_s")
    yield f"{speed:.1f}"
    yield f"{speed / median_of(rows, 'samples_per_s', mode='sync'):.2f}"
    yield f"{median_of(own, 'idle_share'):.1%}"
    yield f"{median_of(own, 'cores_busy'):.0%}"
    yield f"{median_of(own, 'step_s'):.2f}"
    for moved in ("num_migrated", "num_deferred"):
        yield f"{median_of(own, moved):.0f}"
    yield f"{median_of(own, 'mean_response_tokens'):.1f}"
    validated = all(row["validation_last"] is not None for row in rows)
    yield f"{median_of(own, 'validation_last'):.3f}" if validated else "-"
