"""Checks of a table of rollouts. Every complaint names source, row and mending.

Whole columns at a time: `schemas.trace.TraceRow` says the same of a single row.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.trace import REQUIRED

SMALLEST = {"step": 0, "epoch": 0, "sample_index": 0, "prompt_tokens": 1, "response_tokens": 1}
KEY = ("step", "prompt_key", "sample_index")


def check_rows(table: pa.Table, source: str) -> None:
    """Raises ValueError at the first row, counted from 1, that breaks a rule."""
    if not table.num_rows:
        raise ValueError(f"{source} is empty: a trace has a row for every rollout")
    for name in REQUIRED:
        null = table[name].is_null().to_numpy()
        _refuse(null, source, f"has no {name}", "fill it in or drop the row")
    for name, smallest in SMALLEST.items():
        wrong = table[name].to_numpy() < smallest
        _refuse(wrong, source, f"has {name} below {smallest}", "correct it or drop the row")
    empty = table["prompt_key"].to_numpy() == ""
    _refuse(empty, source, "has an empty prompt_key", "name the prompt")
    _check_optional(table, source)
    for part in ("prompt", "response"):
        _check_ids(table, source, part)
    _check_unique(table, source)


def _check_optional(table: pa.Table, source: str) -> None:
    share, reward = table["acceptance"], table["reward"]
    value = share.to_numpy()
    outside = share.is_valid().to_numpy() & ~((value >= 0.0) & (value <= 1.0))
    mending = "give accepted over drafted tokens, between 0 and 1, or null"
    _refuse(outside, source, "has acceptance outside 0..1", mending)
    infinite = reward.is_valid().to_numpy() & ~np.isfinite(reward.to_numpy())
    mending = "give a finite number or null"
    _refuse(infinite, source, "has a reward that is not finite", mending)


def _check_ids(table: pa.Table, source: str, part: str) -> None:
    ids = table[f"{part}_token_ids"]
    if ids.null_count == len(ids):
        return
    counted = pc.call_function("list_value_length", [ids])
    wrong = ids.is_valid().to_numpy() & (counted.to_numpy() != table[f"{part}_tokens"].to_numpy())
    mending = "they must agree, or drop the column of token ids"
    _refuse(wrong, source, f"has {part}_tokens unlike the number of its token ids", mending)


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


def _refuse(wrong: np.ndarray, source: str, what: str, mending: str) -> None:
    if wrong.any():
        raise ValueError(f"{source}, row {int(wrong.argmax()) + 1}, {what}: {mending}")
