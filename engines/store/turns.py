"""Convert answered turns of open conversations to the Arrow table that the store inserts, and back.

A driver that dies takes its open conversations along. These rows outlive it (`Store.open_turns`).
"""

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from refrain.engines.store.rows import COUNTS, generated_columns
from refrain.schemas.rollout import Generated, RequestId, Split, Turn, VersionSpan


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """An answered turn of an open conversation."""

    sample: RequestId
    """Id of the sample in the step whose plan drew it."""
    number: int
    """Number of the turn, from 0."""
    part: Generated
    """Its tokens, log-probabilities and spans, and the turn. The counts are of all turns so far."""
    answer: str
    """The environment's answer (`schemas.environment.EnvironmentAnswer`) as JSON."""


def turn_rows(turns: Sequence[RecordedTurn]) -> pa.Table:
    """Return one row per turn, with the columns of the table `open_turns`."""
    samples = [turn.sample for turn in turns]
    columns = {
        "split": pa.array([str(sample.split) for sample in samples], pa.string()),
        "origin_step": pa.array([sample.step for sample in samples], pa.int32()),
        "prompt_key": pa.array([sample.prompt_key for sample in samples], pa.string()),
        "sample_index": pa.array([sample.sample_index for sample in samples], pa.int32()),
        "number": pa.array([turn.number for turn in turns], pa.int32()),
        "answer": pa.array([turn.answer for turn in turns], pa.string()),
    }
    return pa.table(columns | generated_columns([turn.part for turn in turns]))


def by_sample(rows: pa.Table) -> dict[RequestId, list[RecordedTurn]]:
    """Return the turns of each conversation, from the first on.

    `rows`: in the order in which they were added. A turn that was added again replaces the one with
    its number and all later ones, because the conversation began anew there.
    """
    found: defaultdict[RequestId, list[RecordedTurn]] = defaultdict(list)
    for turn in map(_turn, rows.to_pylist()):
        own = found[turn.sample]
        del own[turn.number :]
        if len(own) == turn.number:
            own.append(turn)
    return {sample: own for sample, own in found.items() if own}


def _turn(row: Mapping[str, Any]) -> RecordedTurn:
    sample = RequestId(
        Split(row["split"]), row["origin_step"], row["prompt_key"], row["sample_index"]
    )
    part = Generated(
        token_ids=array("i", row["response_token_ids"]),
        inference_logprobs=array("f", row["inference_logprobs"]),
        spans=tuple(VersionSpan(**span) for span in row["version_spans"]),
        turns=tuple(Turn(**turn) for turn in row["turns"]),
        **{name: row[name] for name in COUNTS},
    )
    return RecordedTurn(sample, row["number"], part, row["answer"])
