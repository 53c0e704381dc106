"""Gain of each part of rollouts with history: a recorded step with all parts, and without one.

RUN is as for `rollout`. Engines that lack a part generate in turn with engines that have all parts.
The parts and what happens without them:

    shared      no index that all prompts share
    foreseen    drafts are the most likely tokens, whatever the noise of a sample
    blocks      KV blocks of 128 tokens, as vLLM has on a CPU: samples of a short prompt share none
    batches     requests are admitted one by one, and the engine core sends the tokens of each step
    passes      prompts are distributed over engines by expected tokens, not by passes

Seconds are medians of laps. All engines must generate the run's tokens.
"""

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from refrain.benchmarks import one_step
from refrain.benchmarks.laps import Measured, Row, median_of, rows_with
from refrain.benchmarks.recorded import (
    EngineKind,
    Turn,
    add_run_arguments,
    rounds_of,
    share_identical,
)
from refrain.benchmarks.stepwise import StepwiseEngine
from refrain.engines.inference.engine.vllm_engine import VLLMEngine
from refrain.engines.reports.tables import plain_table
from refrain.schemas.bench import BenchReport
from refrain.schemas.drafting import DraftingConfig

PACKAGES = one_step.PACKAGES
ALL = "all"
_VLLM_BLOCK_TOKENS = 128


class LargeBlocksEngine(VLLMEngine):
    """An engine with vLLM's default block size on a CPU."""

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        own = {"block_size": _VLLM_BLOCK_TOKENS} if on_cpu else {}
        return super()._engine_args(on_cpu) | own


WITHOUT = {
    "shared": EngineKind(VLLMEngine, DraftingConfig(shared_tokens=0)),
    "foreseen": EngineKind(VLLMEngine, DraftingConfig(look_ahead=False)),
    "blocks": EngineKind(LargeBlocksEngine, DraftingConfig()),
    "batches": EngineKind(StepwiseEngine, DraftingConfig()),
    "passes": EngineKind(VLLMEngine, DraftingConfig(), by_tokens=True),
}
"""Engines that lack a part."""
GROUPS = (("shared", "foreseen"), ("blocks", "batches"), ("passes",))
"""Parts that are measured together, in turn with `ALL`: as many processes as fit a small machine's
memory."""


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser, epochs="1,5", rounds=1)


def measure(args: Namespace, console: Console) -> Measured:
    rows, exact = [], []
    for recorded in rounds_of(args, console):
        for group, parts in enumerate(GROUPS):
            kinds = {ALL: EngineKind(VLLMEngine, DraftingConfig())}
            kinds |= {part: WITHOUT[part] for part in parts}
            turns = asyncio.run(recorded.roll_out(kinds))
            rows += [_row(turn, group) for turn in turns]
            exact += [(work, lap) for _, work, lap in turns]
    return _figures(rows) | {"identical": share_identical(exact)}, rows


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("epoch", "part", "with it", "without", "gain", text=("part",))
    for epoch in dict.fromkeys(row["epoch"] for row in report.rows):
        for part in WITHOUT:
            of_part = (report.figures[f"{part}_{what}_epoch_{epoch}"] for what in _FIGURES)
            with_s, without_s, gain = of_part
            seconds = (f"{with_s:.2f} s", f"{without_s:.2f} s")
            table.add_row(str(epoch), part, *seconds, f"{gain:.2f}")
    console.print(table)
    console.print(f"identical to the run: {report.figures['identical']:.1%}")


_FIGURES = ("with_s", "without_s", "gain")


def _row(turn: Turn, group: int) -> Row:
    without, work, lap = turn
    row = {"without": without, "group": group, "epoch": work.epoch, "seconds": lap.seconds}
    return row | lap.counts


def _figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return figures. Seconds with a part come from the laps that ran in turn with those without
    it."""
    figures: dict[str, float] = {}
    for epoch in dict.fromkeys(row["epoch"] for row in rows):
        for group, parts in enumerate(GROUPS):
            laps = rows_with(rows, epoch=epoch, group=group)
            with_s = median_of(laps, "seconds", without=ALL)
            for part in parts:
                without_s = median_of(laps, "seconds", without=part)
                values = (with_s, without_s, without_s / with_s)
                names = (f"{part}_{what}_epoch_{epoch}" for what in _FIGURES)
                figures |= dict(zip(names, values, strict=True))
    return figures
