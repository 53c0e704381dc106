"""Train a recorded step again, and break its seconds down by kind of operation.

RUN is a finished run on a CPU that kept the checkpoint before the step. Its trainer trains on the
recorded rollouts again, in one process, from that checkpoint. After a warm-up, laps alternate
between torch's profiler on and off. Shares come from the profiled laps and count the operations'
own time:

    products     matrix products of layers and head, forward and backward
    attention    attention of packed rows
    head         softmax over the vocabulary, entropies, losses
    optimizer    AdamW and the gradient's norm
    memory       copies, gathers, zeros
    elementwise  norms, activations, rotations, sums, the rest

`products_floor` is the time for the products alone / the time of the step, at the speed at which
this machine multiplies the same shapes. No program with the same precision can be faster.
"""

import re
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from benchmarks.laps import Measured, Row, check_counts
from engines.learn.checkpoint import checkpoints_dir
from engines.learn.learner import Learner
from engines.reports.tables import plain_table
from engines.store.store import open_read_only
from flows.simulate_input import find_trace
from schemas.bench import BenchReport
from tasks.run.run_dir import read_config

PACKAGES = ("refrain", "torch", "transformers")
KINDS = {
    "products": ("mm", "addmm", "bmm", "linear", "matmul"),
    "attention": ("attention", "flash"),
    "head": ("logsumexp", "softmax", "gather", "exp", "minimum", "where"),
    "optimizer": ("adam", "adamw", "foreach", "linalg"),
    "memory": (
        "copy",
        "empty",
        "zero",
        "zeros",
        "index",
        "cat",
        "clone",
        "fill",
        "slice",
        "contiguous",
    ),
}
"""Whole words in the names of operations, tried in this order."""
REST = "elementwise"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a finished run: its directory or name")
    parser.add_argument(
        "--step", type=int, default=2, metavar="N", help="step of the run [default: 2]"
    )
    parser.add_argument(
        "--laps",
        type=int,
        default=3,
        metavar="N",
        help="laps with and without the profiler [default: 3]",
    )


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "laps", "step")
    file = find_trace(args.run)
    config = read_config(file.parent)
    before = checkpoints_dir(config) / f"global_step_{args.step - 1}" if args.step > 1 else None
    if before and not before.exists():
        raise ValueError(f"--step {args.step}: {before} is gone: make a run that keeps it")
    with open_read_only(file) as store:
        batch = store.training_rows(args.step)
    rows: list[Row] = []
    for lap in range(args.laps + 1):
        for profiled in (False, True):
            seconds, spent = _train(config, before, batch, profiled)
            if lap:
                rows.append({"seconds": seconds, "profiled": profiled, **spent})
        console.print(f"lap {lap}/{args.laps}")
    return _figures(rows, batch.column("response_token_ids")), rows


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("kind", "share", text=("kind",))
    for kind in (*KINDS, REST):
        table.add_row(kind, f"{report.figures[f'share_{kind}']:.1%}")
    console.print(table)
    figures = report.figures
    console.print(f"{figures['tokens_per_s']:,.0f} response tokens a second")
    console.print(f"products alone: {figures['products_floor']:.1%} of the step's time")


def _train(config: Any, before: Any, batch: Any, profiled: bool) -> tuple[float, dict[str, float]]:
    """Return the seconds of the step, and those of its operations by kind if it is profiled."""
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    learner = Learner(config)
    learner.restore(before)
    started_s = time.perf_counter()
    if not profiled:
        learner.train_step(batch)
        return time.perf_counter() - started_s, {}
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        learner.train_step(batch)
    seconds = time.perf_counter() - started_s
    spent = seconds_by_kind(recorded)
    products = [o for o in recorded.key_averages(group_by_input_shape=True) if _is_product(o.key)]
    spent["products_alone"] = sum(_seconds_alone(o.input_shapes, o.count) for o in products)
    return seconds, spent


def seconds_by_kind(recorded: profile) -> dict[str, float]:
    """Return the operations' own seconds."""
    spent: Counter[str] = Counter()
    for operation in recorded.key_averages():
        spent[kind_of(operation.key)] += operation.self_cpu_time_total / 1e6
    return dict(spent)


def kind_of(operation: str) -> str:
    """Return the kind of an operation, by its name in torch's profiler."""
    words = {word.lower() for word in re.findall("[A-Z]?[a-z]+", operation)}
    return next((kind for kind, known in KINDS.items() if words & {*known}), REST)


def _is_product(name: str) -> bool:
    return name in ("aten::mm", "aten::addmm", "aten::bmm")


def _seconds_alone(shapes: list[list[int]], count: int) -> float:
    """Return the time of `count` products of these shapes with nothing else running."""
    sizes = [shape for shape in shapes if len(shape) >= 2][-2:]
    left, right = (torch.randn(size) for size in sizes)
    torch.matmul(left, right)
    started_s = time.perf_counter()
    for _ in range(3):
        torch.matmul(left, right)
    return (time.perf_counter() - started_s) / 3 * count


def _figures(rows: list[Row], responses: Any) -> dict[str, float]:
    plain = median(row["seconds"] for row in rows if not row["profiled"])
    profiled = [row for row in rows if row["profiled"]]
    sums = {k: median(row.get(k, 0.0) for row in profiled) for k in (*KINDS, REST)}
    total = sum(sums.values())
    num_tokens = sum(map(len, responses.to_pylist()))
    return {
        "seconds": plain,
        "tokens_per_s": num_tokens / plain,
        **{f"share_{kind}": value / total for kind, value in sums.items()},
        "products_floor": median(row["products_alone"] for row in profiled) / plain,
    }
