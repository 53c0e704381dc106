"""Replay the real tokens of a trace to find what drafts from history would have gained. Pure.

As in a run, the history of a prompt is its last earlier group: all samples with their rewards. A
missing reward counts as 0. Sampling is exact, so drafting does not change the trace's tokens, and
the replay (`engines.histospec.replay`) finds which drafts would have been accepted. The prefill
generates a response's first token, so the replay starts after it. The turns of a conversation are
replayed one by one, each with all tokens before it. The passes of a conversation are their sum.

Deviations:

- The gate's decisions depend on the batch, but the batch depends on the replayed passes. So the
  step's prompts are divided round-robin into parts, whatever the placement. There is a part per
  engine, or more parts if the engines cannot decode all requests at once. Each part is replayed
  in lockstep with its own gate.
- Each part learns its acceptance from scratch. A real engine has learnt from earlier steps.
- The n-th turns of all conversations of a part are replayed together.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from refrain.engines.histospec.acceptance import Acceptance
from refrain.engines.histospec.gate import Gate, StepTimes
from refrain.engines.histospec.index import build_index, split_turns, turn_sizes
from refrain.engines.histospec.matching import NO_INDEX, IndexTable
from refrain.engines.histospec.replay import replay
from refrain.engines.histospec.window import window_policy
from refrain.engines.simulate.member import Passes
from refrain.engines.simulate.trace import Trace
from refrain.schemas.drafting import DraftingConfig
from refrain.schemas.rollout import RequestId, Split

PAPER = DraftingConfig(window="paper", max_draft=32)
"""RhymeRL 5.3 and 5.4. The paper's gate is a batch size, see `engines.histospec.gate`."""
DRAFTINGS = {
    "goodput": DraftingConfig(),
    "paper": PAPER,
    "doubling": DraftingConfig(window="doubling"),
}
"""Drafting configs by window policy."""


def replay_step(
    rows: Trace, past: Trace, config: DraftingConfig, times: StepTimes, num_parts: int = 1
) -> dict[RequestId, Passes]:
    """Return the decode steps of every rollout of a step whose prompt has a history.

    Rollouts whose turns have a single token have no decode steps and are left out.

    Args:
        rows: One step of a trace.
        past: The groups before this step (`Trace.before`).
        times: Step times on which the gate decides.
        num_parts: Parts into which the prompts are divided.

    Raise ValueError when one of the traces lacks token ids.
    """
    for trace in (rows, past):
        check_token_ids(trace)
    table, slots = _index(past, rows.table["prompt_key"].unique(), config)
    decoded = rows.table.filter(pc.field("response_tokens") > 1)
    passes: dict[RequestId, Passes] = {}
    for part in _deal(decoded, num_parts):
        part_slots = np.array([slots.get(row["prompt_key"], NO_INDEX) for row in part], np.int32)
        if (part_slots != NO_INDEX).any():
            passes |= _replay_part(part, table, part_slots, config, times)
    return passes


def _deal(rows: pa.Table, num_parts: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each part. Prompts are divided round-robin."""
    keys = rows["prompt_key"].unique()
    for first in range(min(num_parts, len(keys))):
        yield rows.filter(pc.field("prompt_key").isin(keys[first::num_parts])).to_pylist()


def _replay_part(
    rows: Sequence[Mapping[str, Any]],
    table: IndexTable,
    slots: np.ndarray,
    config: DraftingConfig,
    times: StepTimes,
) -> dict[RequestId, Passes]:
    """Replay one part. Rows without a history only make the batch larger."""
    gate = Gate(times if config.gate else None)
    acceptance = Acceptance() if config.window == "goodput" else None
    sums = np.zeros((len(rows), 4), np.int64)
    for number, turns in enumerate(zip_longest(*map(_turns, rows))):
        # The prefill gives the first token of a turn.
        places = [at for at, turn in enumerate(turns) if turn and len(turn[1]) > 1]
        known = [(before, sampled) for before, sampled in (turns[at] for at in places)]
        if not places:
            continue
        counts = replay(
            [[*before, sampled[0]] for before, sampled in known],
            [sampled[1:] for _, sampled in known],
            table.rows,
            slots[places],
            window_policy(config.window, config.max_draft),
            gate=gate,
            acceptance=acceptance,
            starts=np.array([len(before) if number else 0 for before, _ in known], np.int32),
        )
        num_tokens = counts.num_passes + counts.num_accepted
        columns = (counts.num_passes, num_tokens, counts.num_verifications, counts.num_drafted)
        sums[places] += np.stack(columns, axis=1)
    return {
        RequestId(Split.TRAIN, row["step"], row["prompt_key"], row["sample_index"]): Passes(*of_row)
        for row, slot, of_row in zip(rows, slots, sums.tolist(), strict=True)
        if slot != NO_INDEX and of_row[0]
    }


def _turns(row: Mapping[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the tokens before each turn of a row, and those that it sampled."""
    sizes = turn_sizes(row["turns"])
    return list(split_turns(row["prompt_token_ids"], row["response_token_ids"], sizes))


def check_token_ids(trace: Trace) -> None:
    """Raise ValueError when a rollout lacks its token ids."""
    columns = (trace.table[name] for name in ("prompt_token_ids", "response_token_ids"))
    if any(column.null_count for column in columns):
        raise ValueError(
            f"{trace.source} lacks token ids, which drafting from history needs. Make the trace "
            "with `refrain export RUN FILE --token-ids`, or give the run itself"
        )


def _index(
    past: Trace, prompt_keys: pa.Array, config: DraftingConfig
) -> tuple[IndexTable, dict[str, int]]:
    """Return the indexes of the prompts that have a history, and their slots by prompt key."""
    table = IndexTable()
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in past.table.filter(pc.field("prompt_key").isin(prompt_keys)).to_pylist():
        groups.setdefault(row["prompt_key"], []).append(row)
    slots = {}
    for key, group in groups.items():
        responses = [row["response_token_ids"] for row in group]
        rewards = [row["reward"] or 0.0 for row in group]
        index = build_index(
            group[0]["prompt_token_ids"],
            responses,
            rewards,
            turns=[turn_sizes(row["turns"]) for row in group],
            min_match=config.min_match,
            max_match=config.max_match,
            max_draft=config.max_draft,
        )
        slots[key] = table.add(index)
    return table, slots
