"""Traces: read from Parquet, written to it, and exported from a run's store.

The columns are documented once, in `schemas.trace.TraceRow`. A trace that is here has been
checked: whoever simulates it checks nothing.
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

from engines.paths import check_regular
from engines.store.archive import query_all
from schemas.trace import REQUIRED, TraceRow

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
    response_tokens, num_accepted_tokens / nullif(num_draft_tokens, 0) AS acceptance, reward{ids}
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
    """Rollouts as columns; `source` names them in error messages."""

    def __init__(self, table: pa.Table, source: str) -> None:
        """Raises ValueError naming the source, the row and the mending."""
        self.source = source
        self.table = _conform(table, source)
        _check_rows(self.table, source)

    def __len__(self) -> int:
        return self.table.num_rows

    def column(self, name: str) -> np.ndarray:
        """Null is not a number."""
        return self.table[name].to_numpy()

    @cached_property
    def steps(self) -> tuple[int, ...]:
        return tuple(np.unique(self.column("step")).tolist())

    def step(self, step: int) -> "Trace":
        """The rows of one step, in the order of the trace."""
        rows = self.table.filter(pc.field("step") == step)
        if not rows.num_rows:
            raise ValueError(
                f"{self.source} has no step {step}: "
                f"its steps are {self.steps[0]} to {self.steps[-1]}"
            )
        return _checked(rows, self.source)

    def before(self, step: int) -> "Trace":
        """Rows of each prompt in the last step before this one that had it; none, perhaps."""
        keys = self.table["prompt_key"].combine_chunks().dictionary_encode()
        prompts, steps = keys.indices.to_numpy(), self.column("step")
        earlier = steps < step
        last = np.full(len(keys.dictionary), -1, steps.dtype)
        np.maximum.at(last, prompts[earlier], steps[earlier])
        rows = self.table.filter(pa.array(earlier & (steps == last[prompts])))
        return _checked(rows, self.source)

    def history(self, step: int) -> Mapping[str, float]:
        """Median response tokens of each prompt in the last step before this one that had it."""
        table = self.before(step).table
        lengths: dict[str, list[int]] = defaultdict(list)
        columns = (table[name].to_pylist() for name in ("prompt_key", "response_tokens"))
        for key, num_tokens in zip(*columns, strict=True):
            lengths[key].append(num_tokens)
        return {key: float(median(own)) for key, own in lengths.items()}


def read_trace(path: Path | str) -> Trace:
    """Raises ValueError when it is missing, not Parquet, empty, or not a trace."""
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
    """Columns without any value are left out."""
    table = trace.table
    empty = [name for name in table.column_names if table[name].null_count == table.num_rows]
    pq.write_table(table.drop_columns(empty), Path(path), compression="zstd")


def from_store(path: Path | str, *, token_ids: bool = False) -> Trace:
    """The finished rollouts of a run, out of its DuckDB file, which stays as it is.

    Raises ValueError when it is not a run's store, when the run that owns it is still alive, and
    when it has no rollouts.
    """
    path = Path(path)
    ids = ", prompt_token_ids, response_token_ids" if token_ids else ""
    rows = query_all(path, EXPORT.format(ids=ids))
    if not rows.num_rows:
        raise ValueError(f"{path} has no finished rollouts of split train: let the run do a step")
    return Trace(rows, str(path))


def measured_s(path: Path | str) -> dict[int, float]:
    """Seconds of each step of a run, from the first rollout's start to the last one's finish.

    A rollout that changed engines started when it came to the last one. A step that was
    interrupted and resumed counts the pause too. Raises ValueError as `from_store` does.
    """
    rows = query_all(Path(path), MEASURED)
    return dict(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def trained_token_s(path: Path | str) -> float | None:
    """Seconds that a run's trainer took for a token of prompts and responses, the median of its
    steps; None before the first. Raises ValueError as `from_store` does."""
    rows = query_all(Path(path), TRAINED).to_pylist()
    return median(row["train_s"] / row["num_tokens"] for row in rows) if rows else None


def _conform(table: pa.Table, source: str) -> pa.Table:
    missing = [name for name in REQUIRED if name not in table.column_names]
    if missing:
        raise ValueError(
            f"{source} is not a trace: it lacks the column {missing[0]!r}; a trace has "
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
            f"belongs: {error}"
        ) from error


def _check_rows(table: pa.Table, source: str) -> None:
    """Raises ValueError at the first row, counted from 1, that breaks a rule of `TraceRow`. Every
    complaint names source, row and mending."""
    if not table.num_rows:
        raise ValueError(f"{source} is empty: a trace has a row for every rollout")
    for wrong, what, mending in _rules(table):
        if wrong.any():
            raise ValueError(f"{source}, row {int(wrong.argmax()) + 1}, {what}: {mending}")
    _check_unique(table, source)


def _rules(table: pa.Table) -> Iterator[tuple[np.ndarray, str, str]]:
    """(rows that break it, how, what to do), whole columns at a time; each may count on those
    before."""
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
    mending = "give accepted over drafted tokens, between 0 and 1, or null"
    yield outside, "has acceptance outside 0..1", mending
    infinite = reward.is_valid().to_numpy() & ~np.isfinite(reward.to_numpy())
    yield infinite, "has a reward that is not finite", "give a finite number or null"
    for part in ("prompt", "response"):
        ids = table[f"{part}_token_ids"]
        num_ids = pc.call_function("list_value_length", [ids]).to_numpy()
        wrong = ids.is_valid().to_numpy() & (num_ids != table[f"{part}_tokens"].to_numpy())
        what = f"has {part}_tokens unlike the number of its token ids"
        yield wrong, what, "they must agree, or drop the column of token ids"


def _check_unique(table: pa.Table, source: str) -> None:
    prompts = table["prompt_key"].combine_chunks().dictionary_encode().indices.to_numpy()
    columns = [table["step"].to_numpy(), prompts, table["sample_index"].to_numpy()]
    order = np.lexsort(columns[::-1])
    same = np.all([np.diff(column[order]) == 0 for column in columns], axis=0)
    if same.any():
        # lexsort is stable: of two equal rows the later one comes second.
        row = int(order[1:][same].min())
        values = ", ".join(f"{name} {table[name][row]}" for name in KEY)
        raise ValueError(
            f"{source}, row {row + 1}, repeats {values}: a rollout has one row; drop the copies"
        )


def _checked(table: pa.Table, source: str) -> Trace:
    """Rows of a trace are a trace: not checked again."""
    trace = Trace.__new__(Trace)
    trace.source, trace.table = source, table
    return trace
