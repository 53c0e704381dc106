"""Distribute prompts over engines by tokens or by passes, on the responses of a recorded run.

TRACE is a run with drafting: its refrain.duckdb, its directory, or its name under runs/. The bench
draws steps from the prompts of every epoch but the first. It deals each step as `mode=sync` does,
from what the epoch before shows, and then counts the forward passes that the responses took:

    tokens    prompts with the most expected tokens first
    passes    prompts with the most expected passes first (`engines.histopipe.passes`), as shipped
    known     prompts with the most real passes first: the best that any forecast could do

    sums      passes of the engine with the most, over the mean of all engines
    longest   the same for the longest response
    seconds   until the last engine ends, by the step times that the run's engines measured

Correlations are between the ranks of prompts: by expected passes and by real ones. The error is the
mean difference between the two, as a share of the mean; expected passes are scaled to the same sum.
"""

from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np
from rich.console import Console
from rich.progress import track
from scipy.stats import spearmanr

from benchmarks.laps import Measured, Row, check_counts, rows_with
from engines.histopipe.passes import TOKENS, ExpectedPasses, fit_passes
from engines.histopipe.placement import deal_groups
from engines.latency.forecast import Unfinished, finish_s
from engines.latency.interface import Latency
from engines.latency.measured import measured_by
from engines.reports.tables import plain_table
from engines.store.archive import query_all
from flows.simulate_input import find_trace
from schemas.bench import BenchReport
from schemas.rollout import LengthHistory
from schemas.step import PromptGroup, RolloutBatch

PACKAGES = ("refrain", "numpy", "scipy")
RESPONSES = """
SELECT epoch, prompt_key, len(prompt_token_ids) AS prompt_tokens, response_tokens AS num_tokens,
    greatest(1, response_tokens - num_accepted_tokens) AS num_passes, num_draft_tokens
FROM rollouts JOIN prompts USING (prompt_key)
WHERE split = 'train' AND response_tokens > 0
ORDER BY epoch, prompt_key, sample_index
"""
STAGES = "SELECT batch FROM stages WHERE split = 'train' ORDER BY step DESC"
WAYS = ("tokens", "passes", "known")


@dataclass(frozen=True, slots=True)
class TakenResponse:
    """A response with the passes that it took."""

    prompt_tokens: int
    num_tokens: int
    num_passes: int
    num_draft_tokens: int

    @property
    def unfinished(self) -> Unfinished:
        """The whole response, before it begins."""
        return Unfinished(
            context_tokens=self.prompt_tokens,
            remaining_tokens=self.num_tokens,
            tokens_per_pass=self.num_tokens / self.num_passes,
            window=self.num_draft_tokens / self.num_passes,
        )


Group = Sequence[TakenResponse]
Epoch = Mapping[str, Group]
"""Responses by prompt."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a run with drafting")
    parser.add_argument(
        "--engines",
        default="2,4",
        metavar="LIST",
        help="numbers of engines to compare [default: 2,4]",
    )
    parser.add_argument(
        "--prompts", type=int, default=64, metavar="N", help="prompts of a step [default: 64]"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=40,
        metavar="N",
        help="steps drawn from each epoch [default: 40]",
    )


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "prompts", "steps")
    engines = _read_engines(args.engines)
    path = find_trace(args.trace)
    epochs, latency = _read_epochs(path), _read_latency(path)
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    pairs = list(zip(sorted(epochs)[:-1], sorted(epochs)[1:], strict=True))
    for last, epoch in track(pairs, "dealing: epoch", console=console, transient=True):
        keys = sorted(epochs[last].keys() & epochs[epoch].keys())
        for _ in range(args.steps):
            drawn = rng.permutation(len(keys))[: args.prompts]
            step = {keys[i]: epochs[epoch][keys[i]] for i in drawn}
            history = {key: _history(epochs[last][key]) for key in step}
            for row in _deal(step, history, engines, latency):
                rows.append({"epoch": epoch + 1} | row)
    return _figures(rows, engines), _means(rows, engines)


def show(report: BenchReport, console: Console) -> None:
    table = plain_table(
        "epoch", "engines", "by", "rank corr.", "error", "sums", "longest", "s", text=("by",)
    )
    for row in report.rows:
        table.add_row(
            str(row["epoch"]),
            str(row["engines"]),
            str(row["by"]),
            f"{row['correlation']:.3f}",
            f"{row['error']:.1%}",
            f"+{row['sums']:.1%}",
            f"+{row['longest']:.1%}",
            f"{row['seconds']:.3f}",
        )
    console.print(table)
    for name, value in report.figures.items():
        console.print(f"{name} {value:.4f}")


def _read_engines(text: str) -> list[int]:
    numbers = [int(word) if word.isdigit() else 0 for word in text.split(",")]
    if min(numbers) < 2:
        raise ValueError(f"--engines {text!r} must list numbers from 2 on, for example 2,4")
    return numbers


def _read_epochs(path: Path) -> dict[int, Epoch]:
    if path.suffix != ".duckdb":
        raise ValueError(f"{path} is not a run: a trace does not have passes. Give the run itself")
    epochs: defaultdict[int, defaultdict[str, list[TakenResponse]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in query_all(path, RESPONSES).to_pylist():
        epoch, key = row.pop("epoch"), row.pop("prompt_key")
        epochs[epoch][key].append(TakenResponse(**row))
    if len(epochs) < 2:
        raise ValueError(f"{path} has less than two epochs. Give a longer run")
    return dict(epochs)


def _read_latency(path: Path) -> Latency:
    """Return the step times that engines measured in the last step that has any."""
    for batch in query_all(path, STAGES)["batch"].to_pylist():
        if measured := measured_by(RolloutBatch.model_validate_json(batch).shares):
            return measured
    raise ValueError(f"{path}: no engine measured its steps. Give a run with drafting")


def _history(group: Group) -> LengthHistory:
    """Return the history that `queries.LENGTH_HISTORY` finds."""
    tokens = [response.num_tokens for response in group]
    passes = sum(response.num_passes for response in group)
    gained = max(1.0, sum(tokens) / passes)
    return LengthHistory(float(median(tokens)), max(tokens), tokens_per_pass=gained)


def _deal(
    step: Epoch, history: Mapping[str, LengthHistory], engines: Sequence[int], latency: Latency
) -> Iterator[Row]:
    took = {key: float(sum(r.num_passes for r in group)) for key, group in step.items()}
    medians = {key: of.median_tokens for key, of in history.items()}
    ways: dict[str, tuple[Mapping[str, float], ExpectedPasses]] = {
        "tokens": (medians, TOKENS),
        "passes": (medians, fit_passes(history)),
        "known": (took, TOKENS),
    }
    for by, (sizes, expected) in ways.items():
        foreseen = expected.of(sizes)
        came = np.array([took[key] for key in foreseen])
        told = _told(np.array(list(foreseen.values())), came)
        for num_engines in engines:
            groups = deal_groups(list(step), sizes, num_engines, expected)
            row = {"engines": num_engines, "by": by} | told
            yield row | _loads(step, groups, num_engines, latency)


def _told(foreseen: np.ndarray, came: np.ndarray) -> dict[str, float]:
    """Return how well the passes were predicted. Without variation the correlation is 0."""
    scaled = foreseen * came.sum() / foreseen.sum()
    constant = np.ptp(foreseen) == 0.0 or np.ptp(came) == 0.0
    return {
        "correlation": 0.0 if constant else float(spearmanr(foreseen, came).statistic),
        "error": float(np.abs(scaled - came).mean() / came.mean()),
    }


def _loads(
    step: Epoch, groups: Sequence[PromptGroup], num_engines: int, latency: Latency
) -> dict[str, float]:
    shares: list[list[TakenResponse]] = [[] for _ in range(num_engines)]
    for group in groups:
        shares[group.engine] += step[group.prompt_key]
    sums = [sum(response.num_passes for response in share) for share in shares]
    longest = [max((r.num_passes for r in share), default=0) for share in shares]
    times_s = [finish_s(latency, 1, [r.unfinished for r in share]) for share in shares]
    return {
        "sums": max(sums) / fmean(sums) - 1.0,
        "longest": max(longest) / fmean(longest) - 1.0,
        "seconds": max(times_s),
    }


def _means(rows: Sequence[Row], engines: Sequence[int]) -> list[Row]:
    """Return means over the steps of an epoch."""
    epochs = dict.fromkeys(row["epoch"] for row in rows)
    names = [(epoch, num, by) for epoch in epochs for num in engines for by in WAYS]
    return [
        {"epoch": epoch, "engines": num, "by": by}
        | _mean(rows_with(rows, epoch=epoch, engines=num, by=by))
        for epoch, num, by in names
    ]


def _mean(rows: Sequence[Row]) -> dict[str, float]:
    columns = ("correlation", "error", "sums", "longest", "seconds")
    return {column: fmean(row[column] for row in rows) for column in columns}


def _figures(rows: Sequence[Row], engines: Sequence[int]) -> dict[str, int | float]:
    """Return figures over all epochs."""
    figures: dict[str, int | float] = {}
    for by in WAYS[:2]:
        mean = _mean(rows_with(rows, by=by))
        figures |= {f"{by}_{name}": mean[name] for name in ("correlation", "error")}
    for num in engines:
        means = {by: _mean(rows_with(rows, engines=num, by=by)) for by in WAYS}
        for by, mean in means.items():
            figures |= {f"{by}_{name}_{num}": mean[name] for name in ("sums", "longest")}
        by_tokens_s = means["tokens"]["seconds"]
        figures[f"speedup_{num}"] = by_tokens_s / means["passes"]["seconds"]
        figures[f"known_speedup_{num}"] = by_tokens_s / means["known"]["seconds"]
    return figures
