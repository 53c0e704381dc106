"""Rollouts on real engines: stock vLLM against refrain, in turn, on a recorded run's work.

RUN is a finished run, its directory or its name under runs/. It must have kept a checkpoint for
each epoch you ask for, for example `refrain train infra/demo/train.yaml name=long num_epochs=12
trainer.keep_checkpoints=99`. For each epoch all engines get the weights that the run had there, and
generate the requests of the epoch's second step. (At the first step the history has no
samples of that epoch yet.) There are as many engines as in the run:

    stock   vLLM as installed: no speculation, its own sampling
    ngram   vLLM with n-gram drafts, its own sampling
    off     refrain with drafting off
    on      refrain with drafting on, and the run's history up to that step

Stock samples other tokens, so the bench compares tokens per second. Tokens of off and on must be
the same, and those that the run recorded. Figures are medians. Every lap starts with a cold prefix
cache. Engines are started anew for each round, as one process is a few per cent faster than another
of its kind.

`saved_predicted_over_measured` checks the seconds that a run's timeline says drafting saved. It
divides that prediction for the laps of on by how much longer the laps of off took. The figure is
that of the epoch farthest from 1, among epochs with drafts.
"""

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log

from rich.console import Console

from refrain.benchmarks import one_step
from refrain.benchmarks.laps import Measured, Row, median_of, rows_with
from refrain.benchmarks.recorded import (
    UNDRAFTED,
    EngineKind,
    Work,
    add_run_arguments,
    rounds_of,
    share_identical,
)
from refrain.benchmarks.stock import StockEngine, StockNgramEngine
from refrain.engines.accounting.savings import MEASURED, acted, engine_costs, step_savings
from refrain.engines.accounting.step_requests import Stay, StepRequest
from refrain.engines.inference.engine.vllm_engine import VLLMEngine
from refrain.engines.reports.tables import plain_table
from refrain.schemas.bench import BenchReport
from refrain.schemas.drafting import DraftingConfig

PACKAGES = one_step.PACKAGES
GROUPS = (("stock", "off", "on"), ("stock", "ngram"))
"""Engines that run in turn: as many processes as fit a small machine's memory."""
KINDS = {
    "stock": EngineKind(StockEngine, UNDRAFTED),
    "ngram": EngineKind(StockNgramEngine, UNDRAFTED),
    "off": EngineKind(VLLMEngine, UNDRAFTED),
    "on": EngineKind(VLLMEngine, DraftingConfig()),
}


@dataclass(frozen=True)
class EngineLap:
    name: str
    group: int
    """Index in `GROUPS`: the lap ran in turn with the others there."""
    work: Work
    lap: one_step.Lap

    def row(self) -> Row:
        counts = self.lap.counts
        return {
            "engine": self.name,
            "group": self.group,
            "epoch": self.work.epoch,
            "seconds": self.lap.seconds,
            "num_tokens": counts["num_tokens"],
            "tokens_per_s": counts["num_tokens"] / self.lap.seconds,
            "num_draft_tokens": counts["num_draft_tokens"],
            "num_accepted_tokens": counts["num_accepted_tokens"],
            "saved_s": _saved_s(self.lap),
        }


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser, epochs="1,2,5,10", rounds=3)
    parser.add_argument("--no-ngram", action="store_true", help="leave n-gram drafts out")


def measure(args: Namespace, console: Console) -> Measured:
    laps: list[EngineLap] = []
    for round_works in rounds_of(args, console):
        for group, names in enumerate(GROUPS[:1] if args.no_ngram else GROUPS):
            kinds = {name: KINDS[name] for name in names}
            measured = asyncio.run(round_works.roll_out(kinds))
            laps += [EngineLap(name, group, work, lap) for name, work, lap in measured]
    rows = [lap.row() for lap in laps]
    exact = [(lap.work, lap.lap) for lap in laps if lap.name in ("off", "on")]
    epochs = list(dict.fromkeys(lap.work.epoch for lap in laps))
    return _figures(rows, epochs) | {"identical": share_identical(exact)}, rows


def show(report: BenchReport, console: Console) -> None:
    columns = ("epoch", "engine", "tokens/s", "over stock", "accepted", "from drafts")
    table = plain_table(*columns, text=("engine",))
    for epoch in dict.fromkeys(row["epoch"] for row in report.rows):
        for name in dict.fromkeys(row["engine"] for row in report.rows):
            figures, end = report.figures, f"{name}_epoch_{epoch}"
            table.add_row(
                str(epoch),
                name,
                f"{figures[f'tokens_per_s_{end}']:,.0f}",
                f"{figures[f'speedup_{end}']:.2f}",
                f"{figures[f'acceptance_rate_{end}']:.1%}",
                f"{figures[f'speculation_rate_{end}']:.1%}",
            )
    console.print(table)
    console.print(f"identical to the run, off and on: {report.figures['identical']:.1%}")
    if ratio := report.figures.get("saved_predicted_over_measured"):
        console.print(f"predicted / measured seconds saved, farthest from 1: {ratio:.2f}")


def _saved_s(lap: one_step.Lap) -> float:
    """Return the seconds that drafting saved, as a run's timeline would show; 0 without drafts."""
    shares = lap.outcome.shares
    requests = [
        StepRequest(
            id=rollout.id,
            stays=(Stay(rollout.engine, rollout.started_s, rollout.finished_s),),
            finish_reason=str(rollout.finish_reason),
            step_tokens=rollout.num_tokens,
            response_tokens=rollout.num_tokens,
            prompt_tokens=len(rollout.request.prompt_token_ids),
            num_draft_tokens=rollout.generated.num_draft_tokens,
            num_accepted_tokens=rollout.generated.num_accepted_tokens,
        )
        for rollout in lap.rollouts
    ]
    if not acted(requests, ()) or not any(share.drafting.step_costs for share in shares):
        return 0.0
    savings = step_savings(requests, (), engine_costs(requests, shares, {}, None), MEASURED)
    return savings.each[0].saved_s if savings else 0.0


def _figures(rows: Sequence[Row], epochs: Sequence[int]) -> dict[str, float]:
    """Return figures. Speed-ups are over the stock laps that ran in turn with an engine's own."""
    figures: dict[str, float] = {}
    for epoch in epochs:
        for group, names in enumerate(GROUPS):
            if not (laps := rows_with(rows, group=group, epoch=epoch)):
                continue
            stock = median_of(laps, "tokens_per_s", engine="stock")
            for name in names[group:]:
                own = rows_with(laps, engine=name)
                end = f"{name}_epoch_{epoch}"
                figures |= {f"{key}_{end}": value for key, value in _of_engine(own, stock).items()}
        figures[f"speedup_epoch_{epoch}"] = figures[f"speedup_on_epoch_{epoch}"]
    return figures | _saved_figures(rows, epochs)


def _saved_figures(rows: Sequence[Row], epochs: Sequence[int]) -> dict[str, float]:
    """Return the ratio of every epoch with drafts, and the one farthest from 1."""
    ratios = {}
    for epoch in epochs:
        on, off = (rows_with(rows, group=0, epoch=epoch, engine=name) for name in ("on", "off"))
        if any(row["num_draft_tokens"] for row in on):
            longer_s = median_of(off, "seconds") - median_of(on, "seconds")
            ratio = median_of(on, "saved_s") / longer_s
            ratios[f"saved_predicted_over_measured_epoch_{epoch}"] = ratio
    if not ratios:
        return {}
    farthest = max(ratios.values(), key=lambda ratio: abs(log(ratio)) if ratio > 0 else inf)
    return ratios | {"saved_predicted_over_measured": farthest}


def _of_engine(laps: Sequence[Row], stock: float) -> dict[str, float]:
    counted = ("num_draft_tokens", "num_accepted_tokens", "num_tokens")
    drafted, accepted, tokens = (sum(row[column] for row in laps) for column in counted)
    speed = median_of(laps, "tokens_per_s")
    return {
        "tokens_per_s": speed,
        "speedup": speed / stock,
        "acceptance_rate": accepted / max(1, drafted),
        "speculation_rate": accepted / tokens,
    }
