"""Read traces from Parquet, write them, and export them from a run's store.

`schemas.trace.TraceRow` documents the columns. A `Trace` is checked when it is made, so the
simulator checks nothing again.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from refrain.engines.paths import check_regular
from refrain.engines.simulate.turns import TURNS, turn_sums, wrong_turns
from refrain.engines.store.archive import query_all
from refrain.schemas.trace import REQUIRED, TraceRow

TYPES: dict[Any, pa.DataType] = {
    "step": pa.int64(),
    "epoch": pa.int64(),
    "prompt_key": pa.string(),
    "sample_index": pa.int64(),
    "prompt_tokens": pa.int64(),
    "response_tokens": pa.int64(),
    "acceptance": pa.float64(),
    "reward": pa.float64(),
    "prompt_token_ids": pa.list_(pa.int32()),
    "response_token_ids": pa.list_(pa.int32()),
    "turns": TURNS,
}
SCHEMA = pa.schema(
    [pa.field(name, TYPES[name], nullable=name not in REQUIRED) for name in TraceRow.model_fields]
)
"""`TraceRow` as Arrow."""
SMALLEST = {"step": 0, "epoch": 0, "sample_index": 0, "prompt_tokens": 1, "response_tokens": 1}
KEY = ("step", "prompt_key", "sample_index")

EXPORT = """
SELECT origin_step AS step, epoch, prompt_key,
    CASE WHEN sample_index < 0 THEN -1 - sample_index ELSE sample_index END AS sample_index,
    len(prompt_token_ids) AS prompt_tokens,
    response_tokens, num_accepted_tokens / nullif(num_draft_tokens, 0) AS acceptance, reward,
    CASE WHEN len(turns) > 0 THEN [{{
        'num_sampled': turn.num_sampled, 'num_observed': turn.num_observed,
        'waited_s': turn.waited_s
    }} for turn in turns] END AS turns{ids}
FROM rollouts
JOIN prompts USING (prompt_key)
LEFT JOIN rewards USING (split, step, prompt_key, sample_index)
WHERE split = 'train' AND response_tokens > 0
ORDER BY 1, 3, 4
"""
MEASURED = """
SELECT step, max(finished_s) - min(started_s) AS seconds FROM rollouts WHERE split = 'train'
GROUP BY step HAVING seconds > 0 ORDER BY step
"""
TRAINED = """
SELECT CAST(json_extract(report, '$.timing_s.train') AS DOUBLE) AS train_s,
    CAST(sum(len(prompt_token_ids) + response_tokens) AS DOUBLE) AS num_tokens
FROM steps JOIN rollouts USING (step) JOIN prompts USING (prompt_key)
WHERE split = 'train' GROUP BY step, train_s HAVING train_s > 0 AND num_tokens > 0
"""


class Trace:
    """A table of rollouts. `source` is its name in error messages."""

    def __init__(self, table: pa.Table, source: str) -> None:
        """Check the table. Raise ValueError that names the source, the row and how to fix it."""
        self.source = source
        self.table = _conform(table, source)
        _check_rows(self.table, source)

    def __len__(self) -> int:
        return self.table.num_rows

    def column(self, name: str) -> np.ndarray:
        """Return a column; null values become NaN."""
        return self.table[name].to_numpy()

    @cached_property
    def steps(self) -> tuple[int, ...]:
        return tuple(np.unique(self.column("step")).tolist())

    def step(self, step: int) -> "Trace":
        """Return the rows of one step, in the order of the trace. Raise ValueError without any."""
        rows = self.table.filter(pc.field("step") == step)
        if not rows.num_rows:
            raise ValueError(
                f"{self.source} has no step {step}: "
                f"its steps are {self.steps[0]} to {self.steps[-1]}"
            )
        return _checked(rows, self.source)

    def before(self, step: int) -> "Trace":
        """Return each prompt's rows in its last step before this one. The result may be empty."""
        keys = self.table["prompt_key"].combine_chunks().dictionary_encode()
        prompts, steps = keys.indices.to_numpy(), self.column("step")
        earlier = steps < step
        last = np.full(len(keys.dictionary), -1, steps.dtype)
        np.maximum.at(last, prompts[earlier], steps[earlier])
        rows = self.table.filter(pa.array(earlier & (steps == last[prompts])))
        return _checked(rows, self.source)

    def history(self, step: int) -> Mapping[str, float]:
        """Return each prompt's median response tokens in its last step before this one."""
        table = self.before(step).table
        lengths: dict[str, list[int]] = defaultdict(list)
        columns = (table[name].to_pylist() for name in ("prompt_key", "response_tokens"))
        for key, num_tokens in zip(*columns, strict=True):
            lengths[key].append(num_tokens)
        return {key: float(median(own)) for key, own in lengths.items()}


def read_trace(path: Path | str) -> Trace:
    """Read a trace. Raise ValueError if the file is missing, not Parquet, empty or not a trace."""
    path = Path(path)
    check_regular(path)
    try:
        with pq.ParquetFile(path) as file:
            known = [name for name in file.schema_arrow.names if name in SCHEMA.names]
            table = file.read(columns=known)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error
    return Trace(table, str(path))


def write_trace(trace: Trace, path: Path | str) -> None:
    """Write a trace to Parquet without its empty columns."""
    table = trace.table
    empty = [name for name in table.column_names if table[name].null_count == table.num_rows]
    pq.write_table(table.drop_columns(empty), Path(path), compression="zstd")


def from_store(path: Path | str, *, token_ids: bool = False) -> Trace:
    """Export a run's finished rollouts from its DuckDB file, without changing the file.

    Raise ValueError when the file is not a run's store, when the run is still alive, and when the
    store has no rollouts.
    """
    path = Path(path)
    ids = ", prompt_token_ids, response_token_ids" if token_ids else ""
    rows = query_all(path, EXPORT.format(ids=ids))
    if not rows.num_rows:
        raise ValueError(
            f"{path} has no finished rollouts of split train: let the run finish a step first"
        )
    return Trace(rows, str(path))


def measured_s(path: Path | str) -> dict[int, float]:
    """Return the seconds of each step of a run, from its first rollout's start to its last finish.

    A rollout that migrated starts when its last engine got it. A step that was interrupted and
    resumed includes the pause. Raise ValueError as `from_store` does.
    """
    rows = query_all(Path(path), MEASURED)
    return dict(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def trained_token_s(path: Path | str) -> float | None:
    """Return the seconds that a run's trainer took per prompt and response token, the median over
    its steps. Return None before the first step. Raise ValueError as `from_store` does."""
    rows = query_all(Path(path), TRAINED).to_pylist()
    return median(row["train_s"] / row["num_tokens"] for row in rows) if rows else None


def _conform(table: pa.Table, source: str) -> pa.Table:
    missing = [name for name in REQUIRED if name not in table.column_names]
    if missing:
        raise ValueError(
            f"{source} is not a trace: it lacks the column {missing[0]!r}. A trace has the columns "
            f"{', '.join(REQUIRED)}"
        )
    columns = [_column(table, field, source) for field in SCHEMA]
    return pa.table(columns, schema=pa.schema([field.with_nullable(True) for field in SCHEMA]))


def _column(table: pa.Table, field: pa.Field, source: str) -> pa.ChunkedArray | pa.Array:
    if field.name not in table.column_names:
        return pa.nulls(table.num_rows, field.type)
    try:
        return table[field.name].cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(
            f"{source}, column {field.name!r}, is {table[field.name].type} where {field.type} "
            f"is needed: {error}"
        ) from error


def _check_rows(table: pa.Table, source: str) -> None:
    """Raise ValueError for the first row, counted from 1, that breaks a rule of `TraceRow`. The
    error names the source, the row and how to fix it."""
    if not table.num_rows:
        raise ValueError(f"{source} is empty: a trace has a row for every rollout")
    for wrong, what, fix in _rules(table):
        if wrong.any():
            raise ValueError(f"{source}, row {int(wrong.argmax()) + 1}, {what}: {fix}")
    _check_unique(table, source)


def _rules(table: pa.Table) -> Iterator[tuple[np.ndarray, str, str]]:
    """Yield (mask of wrong rows, what is wrong, how to fix it) for each rule.

    A rule is checked on a whole column at a time, after the rules before it hold.
    """
    for name in REQUIRED:
        null = table[name].is_null().to_numpy()
        yield null, f"has no {name}", "fill it in or drop the row"
    for name, smallest in SMALLEST.items():
        wrong = table[name].to_numpy() < smallest
        yield wrong, f"has {name} below {smallest}", "correct it or drop the row"
    yield table["prompt_key"].to_numpy() == "", "has an empty prompt_key", "name the prompt"
    share, reward = table["acceptance"], table["reward"]
    value = share.to_numpy()
    outside = share.is_valid().to_numpy() & ~((value >= 0.0) & (value <= 1.0))
    fix = "give accepted over drafted tokens, between 0 and 1, or null"
    yield outside, "has acceptance outside 0..1", fix
    infinite = reward.is_valid().to_numpy() & ~np.isfinite(reward.to_numpy())
    yield infinite, "has a reward that is not finite", "give a finite number or null"
    fix = "correct it, or drop the column turns"
    yield wrong_turns(table), "has a turn without a sampled token, or with a number below 0", fix
    sums = turn_sums(table)
    response_tokens = table["response_tokens"].to_numpy()
    wrong = table["turns"].is_valid().to_numpy() & (sums.sampled != response_tokens)
    yield wrong, "has response_tokens unlike the sum of its turns' num_sampled", fix
    for part, observed in (("prompt", 0), ("response", sums.observed)):
        ids = table[f"{part}_token_ids"]
        num_ids = pc.call_function("list_value_length", [ids]).to_numpy()
        num_tokens = table[f"{part}_tokens"].to_numpy() + observed
        what = f"has {part}_tokens unlike the number of its token ids"
        fix = "make them equal, or drop the column of token ids"
        yield ids.is_valid().to_numpy() & (num_ids != num_tokens), what, fix


def _check_unique(table: pa.Table, source: str) -> None:
    prompts = table["prompt_key"].combine_chunks().dictionary_encode().indices.to_numpy()
    columns = [table["step"].to_numpy(), prompts, table["sample_index"].to_numpy()]
    order = np.lexsort(columns[::-1])
    same = np.all([np.diff(column[order]) == 0 for column in columns], axis=0)
    if same.any():
        # lexsort is stable, so the later one of two equal rows comes second.
        row = int(order[1:][same].min())
        values = ", ".join(f"{name} {table[name][row]}" for name in KEY)
        raise ValueError(
            f"{source}, row {row + 1}, repeats {values}: a rollout has one row. Drop the copies"
        )


def _checked(table: pa.Table, source: str) -> Trace:
    """Return rows of a checked trace as a trace, without another check."""
    trace = Trace.__new__(Trace)
    trace.source, trace.table = source, table
    return trace
