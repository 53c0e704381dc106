"""The turns of recorded conversations, as a trace has them. Pure.

A virtual engine replays them: a turn ends after its recorded tokens, the conversation leaves the
batch for its recorded wait, and the next turn begins with a prefill of what it observed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from refrain.schemas.rollout import Generated, Turn

TURNS = pa.list_(
    pa.struct({"num_sampled": pa.int32(), "num_observed": pa.int32(), "waited_s": pa.float64()})
)


class TurnSums(NamedTuple):
    """Sums over the turns of each row. 0 without turns."""

    sampled: np.ndarray
    observed: np.ndarray
    waited_s: np.ndarray


def turn_sums(table: pa.Table) -> TurnSums:
    rows, columns = _flat(table)
    sampled, observed, waited_s = (
        np.bincount(rows, weights=of, minlength=len(table)) for of in columns
    )
    return TurnSums(sampled.astype(np.int64), observed.astype(np.int64), waited_s)


def wrong_turns(table: pa.Table) -> np.ndarray:
    """Return which rows have a turn without a sampled token, or with a negative number."""
    rows, (sampled, observed, waited_s) = _flat(table)
    right = (sampled >= 1) & (observed >= 0) & (waited_s >= 0.0) & np.isfinite(waited_s)
    return np.bincount(rows, weights=~right, minlength=len(table)) > 0


def recorded_turns(table: pa.Table) -> list[tuple[Turn, ...]]:
    """Return the turns of each row. Empty without turns."""
    return [tuple(Turn(**turn) for turn in own or ()) for own in table["turns"].to_pylist()]


def turns_so_far(ended: Sequence[Turn], back_s: float | None) -> tuple[Turn, ...]:
    """Return the turns of an unfinished conversation. `ended`: as recorded. `back_s`: time of the
    answer to the last one, if the conversation waits for it."""
    if back_s is None:
        return tuple(ended)
    *others, last = ended
    return (*others, replace(last, num_observed=None, ended_s=back_s - last.waited_s))


def answer_s(before: Generated, turns: Sequence[Turn]) -> float | None:
    """Return the time at which the conversation gets the answer to its last turn, or None if it
    does not wait for one. `turns`: as recorded."""
    last = before.turns[-1] if before.turns else None
    if last is None or last.num_observed is not None:
        return None
    assert last.ended_s is not None
    return last.ended_s + turns[len(before.turns) - 1].waited_s


def _flat(table: pa.Table) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the row of each turn, and the columns of `TURNS` over all turns; null is 0."""
    column = table["turns"].combine_chunks()
    rows = pc.call_function("list_parent_indices", [column]).to_numpy()
    turns = pc.call_function("list_flatten", [column])
    names = [field.name for field in TURNS.value_type]
    return rows, [turns.field(n).fill_null(0).to_numpy(zero_copy_only=False) for n in names]
