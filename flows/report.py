"""`refrain report`: how similar a run's responses and lengths are from epoch to epoch."""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.console import Console

from refrain.engines.accounting.epoch_similarity import (
    LengthChanges,
    RankChanges,
    Similarity,
    length_changes,
    rank_changes,
    similarity,
)
from refrain.engines.reports import similarity as similarity_report
from refrain.flows.output_file import JSON, PNG, check_output, write_output, writing
from refrain.schemas.bench import BenchReport
from refrain.tasks.run.find import find_run
from refrain.tasks.run.store_query import query_run

RANKING_GROUPS = (8, 16)
"""Numbers of ranking groups in the paper (RhymeRL)."""
MOST_TOKENS = 40_000_000
"""Tokens of an epoch that are compared at most. Larger runs are compared on some prompts only."""
_LENGTHS = """
SELECT epoch, prompt_key, list(response_tokens) AS lengths
FROM rollouts WHERE split = 'train' GROUP BY ALL ORDER BY ALL
"""
_RESPONSES = """
SELECT prompt_key, response_token_ids FROM rollouts
WHERE split = 'train' AND epoch = {epoch} AND prompt_key IN ({keys})
"""
Ask = Callable[[str], pa.Table]


def launch_report(
    run: str, runs_dir: Path, timeout_s: float, json_file: str | None, png_file: str | None
) -> None:
    """Print the report, and write or draw it on request. Raise ValueError when there is no such
    run, when it has no second epoch yet, or when a file cannot be written."""
    check_output(json_file, JSON, "--json")
    check_output(png_file, PNG, "--png")
    run_dir = find_run(run, runs_dir)
    lengths = _lengths(ask := _asking(run_dir, timeout_s))
    if len(lengths) < 2:
        raise ValueError(
            f"{run_dir} has {len(lengths)} epoch(s): a report compares epochs and needs at least "
            "two. Wait until the run has begun its second epoch"
        )
    similar = list(_similarities(ask, lengths))
    changes = list(_changes(lengths))
    found = (similar, changes, list(_length_changes(lengths)))
    if png_file:
        with writing(png_file) as picture:
            similarity_report.draw(similar, changes, picture)
    if json_file:
        write_output(json_file, _report(*found).model_dump_json(indent=1) + "\n")
    if json_file != "-":
        console = Console(highlight=False, markup=False)
        for title, table in similarity_report.tables(*found):
            console.print(f"\n{title}", style="bold")
            console.print(table)


def _asking(run_dir: Path, timeout_s: float) -> Ask:
    return lambda query: query_run(run_dir, query, timeout_s)


Epochs = dict[int, dict[str, list[int]]]


def _lengths(ask: Ask) -> Epochs:
    """Return the numbers of response tokens by epoch and prompt."""
    epochs: Epochs = {}
    for row in ask(_LENGTHS).to_pylist():
        epochs.setdefault(row["epoch"], {})[row["prompt_key"]] = row["lengths"]
    return epochs


def _similarities(ask: Ask, lengths: Epochs) -> Iterator[Similarity]:
    keys = _sample(lengths)
    before = _responses(ask, min(lengths), keys)
    for epoch in sorted(lengths)[1:]:
        now = _responses(ask, epoch, keys)
        yield similarity(epoch, now, before)
        before = now


def _sample(lengths: Epochs) -> list[str]:
    """Return evenly spaced prompts of the first epoch, so few that no epoch has more than
    MOST_TOKENS tokens of them (on average)."""
    keys = sorted(lengths[min(lengths)])
    most = max(sum(map(sum, epoch.values())) for epoch in lengths.values())
    return keys[:: max(1, -(-most // MOST_TOKENS))]


def _responses(ask: Ask, epoch: int, keys: list[str]) -> dict[str, list[np.ndarray]]:
    quoted = ", ".join(f"'{key}'" for key in keys)
    table = ask(_RESPONSES.format(epoch=epoch, keys=quoted))
    found: dict[str, list[np.ndarray]] = {}
    tokens = table["response_token_ids"].combine_chunks()
    for key, response in zip(table["prompt_key"].to_pylist(), tokens, strict=True):
        found.setdefault(key, []).append(response.values.to_numpy())
    return found


def _changes(lengths: Epochs) -> Iterator[RankChanges]:
    epochs = sorted(lengths)
    for num_groups in RANKING_GROUPS:
        for earlier, (before, now) in zip([None, *epochs], pairwise(epochs), strict=False):
            of_earlier = lengths[earlier] if earlier is not None else {}
            yield rank_changes(now, num_groups, lengths[now], lengths[before], of_earlier)


def _length_changes(lengths: Epochs) -> Iterator[LengthChanges]:
    before: Mapping[str, list[int]] = {}
    for epoch in sorted(lengths):
        yield length_changes(epoch, lengths[epoch], before)
        before = lengths[epoch]


def _report(
    similar: list[Similarity], changes: list[RankChanges], lengths: list[LengthChanges]
) -> BenchReport:
    return BenchReport(
        name="report",
        figures=similarity_report.figures(similar, changes, lengths),
        rows=tuple(similarity_report.rows(similar, changes, lengths)),
        command=shlex.join(["refrain", *sys.argv[1:]]),
        versions={name: version(name) for name in ("duckdb", "numpy")},
    )
