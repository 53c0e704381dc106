"""What drafting from history does to the responses of a trace: its real tokens, replayed. Pure.

A prompt is drafted for from its last earlier group, all samples with their rewards, as in a run; a
missing reward counts 0. Sampling is exact, so the tokens stay those of the trace, and the replay
(`engines.histospec.replay`) says which drafts would have been right. The first token of a response
comes from the prefill: the decode steps of the replay begin after it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engines.histospec.drafting import IndexTable
from engines.histospec.index import build_index
from engines.histospec.replay import replay
from engines.histospec.window import AIMD, Doubling, WindowPolicy
from engines.simulate.member import Passes
from engines.simulate.trace import Trace
from schemas.rollout import RequestId, Split

DEFAULT: WindowPolicy = Doubling()
WINDOWS: dict[str, WindowPolicy] = {"paper": AIMD(), "doubling": Doubling()}
"""Window policies by name; `paper` is that of RhymeRL 5.4."""


def replay_step(rows: Trace, past: Trace, windows: WindowPolicy) -> dict[RequestId, Passes]:
    """The decode steps of every rollout that has some and whose prompt has a history.

    `rows` are a step of a trace, `past` the groups before it (`Trace.before`). Raises ValueError
    when one of them lacks token ids.
    """
    for trace in (rows, past):
        check_token_ids(trace)
    table, slots = _index(past, rows.table["prompt_key"].unique())
    drafted_for = pc.field("prompt_key").isin(pa.array(slots, pa.string()))
    decoded = pc.field("response_tokens") > 1
    wanted = rows.table.filter(drafted_for & decoded).to_pylist()
    counts = replay(
        [[*row["prompt_token_ids"], row["response_token_ids"][0]] for row in wanted],
        [row["response_token_ids"][1:] for row in wanted],
        table.rows,
        np.array([slots[row["prompt_key"]] for row in wanted], np.int32),
        windows,
    )
    num_tokens = counts.num_passes + counts.num_accepted
    columns = (counts.num_passes, num_tokens, counts.num_verifications, counts.num_drafted)
    passes = zip(*(column.tolist() for column in columns), strict=True)
    return {_id(row): Passes(*numbers) for row, numbers in zip(wanted, passes, strict=True)}


def check_token_ids(trace: Trace) -> None:
    """Raises ValueError when a rollout lacks them."""
    columns = (trace.table[name] for name in ("prompt_token_ids", "response_token_ids"))
    if any(column.null_count for column in columns):
        raise ValueError(
            f"{trace.source} lacks token ids, and what is drafted from history are tokens: make "
            "the trace by `refrain export RUN FILE --token-ids`, or give the run itself"
        )


def _index(past: Trace, prompt_keys: pa.Array) -> tuple[IndexTable, dict[str, int]]:
    """Of these prompts, as far as they have a past: the indexes and their slots."""
    table = IndexTable()
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in past.table.filter(pc.field("prompt_key").isin(prompt_keys)).to_pylist():
        groups.setdefault(row["prompt_key"], []).append(row)
    slots = {}
    for key, group in groups.items():
        responses = [row["response_token_ids"] for row in group]
        rewards = [row["reward"] or 0.0 for row in group]
        slots[key] = table.add(build_index(group[0]["prompt_token_ids"], responses, rewards))
    return table, slots


def _id(row: Mapping[str, Any]) -> RequestId:
    return RequestId(Split.TRAIN, row["step"], row["prompt_key"], row["sample_index"])
