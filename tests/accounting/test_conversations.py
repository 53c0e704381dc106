"""Metrics of conversations, from hand-made rows."""

from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pytest

from refrain.engines.accounting.conversations import conversation_metrics
from refrain.engines.accounting.metrics import (
    SUMMARISED_COLUMNS,
    rollout_metrics,
    summarise_rollouts,
)
from refrain.engines.store.store import Store
from refrain.engines.store.tables import TURNS
from refrain.schemas.rollout import Split, Turn
from refrain.schemas.step import RolloutBatch
from tests.accounting.test_metrics import PLAN, ROWS, TIMELINE, outcome, share
from tests.store.test_store import add_rollouts
from tests.store.test_turns import talk

TALKS = (
    (Turn(5, 3, 0.5, num_calls=2, num_failed_calls=1), Turn(4, 2, 1.5, num_calls=1), Turn(1)),
    (Turn(9),),
    (Turn(2, 7, 2.0), Turn(6, waited_s=4.0)),
    (Turn(8, waited_s=2.0, num_calls=1),),
)
REASONS = ("turns", "length", "time", "failed")


def rows_of(talks=TALKS, reasons=REASONS) -> pa.Table:
    turns = [None if talk is None else [asdict(turn) for turn in talk] for talk in talks]
    return pa.table({"turns": pa.array(turns, TURNS), "finish_reason": list(reasons)})


def test_turns_are_summed_up_by_response():
    assert conversation_metrics(rows_of(), 5.0) == pytest.approx(
        {
            "environment/turns/mean": 7 / 4,
            "environment/turns/max": 3.0,
            "environment/observed_tokens/mean": 12 / 4,
            "environment/calls/mean": 4 / 4,
            "environment/failed_calls/mean": 1 / 4,
            "environment/wait_s/mean": 10 / 4,
            "environment/wait_s/max": 6.0,
            "environment/wait_share": 0.5,
            "environment/cut/turns": 0.25,
            "environment/cut/time": 0.25,
            "environment/cut/context": 0.0,
        }
    )


def test_first_and_later_turns_have_their_own_acceptance():
    def drafted(*counts):
        return [Turn(9, num_draft_tokens=n, num_accepted_tokens=own) for n, own in counts]

    talks = [drafted((8, 2), (4, 3), (2, 2)), [], drafted((2, 1)), drafted((0, 0))]
    metrics = conversation_metrics(rows_of(talks), 5.0)
    assert metrics["environment/accept_rate/first_turns"] == pytest.approx(0.3)
    assert metrics["environment/accept_rate/later_turns"] == pytest.approx(5 / 6)


def test_rows_in_chunks_have_the_same_metrics():
    """Each chunk has offsets of its own, as rows of a store do."""
    rows = rows_of()
    chunks = pa.concat_tables([rows.slice(0, 1), rows.slice(1, 2), rows.slice(3)])
    assert chunks["turns"].num_chunks == 3
    assert conversation_metrics(chunks, 5.0) == conversation_metrics(rows, 5.0)
    assert conversation_metrics(rows.slice(1), 0.0)["environment/wait_s/max"] == 6.0


@pytest.mark.parametrize("talks", [[(), ()], [None, None], []])
def test_without_an_environment_there_are_none(talks):
    assert conversation_metrics(rows_of(talks, ["stop"] * len(talks)), 5.0) == {}


def test_a_response_of_an_older_refrain_counts_as_one_without_turns():
    metrics = conversation_metrics(rows_of([None, (Turn(2),)], ["stop", "stop"]), 0.0)
    assert metrics["environment/turns/mean"] == 0.5
    assert "environment/wait_share" not in metrics


def summary(rows: pa.Table) -> RolloutBatch:
    return summarise_rollouts(PLAN, rows, outcome(share(0, 4.0)), TIMELINE)


def test_a_step_logs_them_also_when_its_batch_was_read_again():
    rows = ROWS.drop_columns(["turns"]).append_column("turns", rows_of()["turns"])
    read = RolloutBatch.model_validate_json(summary(rows).model_dump_json())
    metrics = rollout_metrics(read)
    assert metrics["environment/turns/max"] == 3.0
    assert metrics["environment/wait_share"] == pytest.approx(2.5 / 4.0)
    assert not [name for name in rollout_metrics(summary(ROWS)) if "environment" in name]


def test_rows_of_a_store_have_the_same_metrics(tmp_path: Path):
    """The store gives the turns in its own Arrow types, and in one step after another."""
    talks = [(Turn(2, 3, 0.5, num_calls=1), Turn(4)), (Turn(5),), ()]
    with Store(tmp_path / "run.duckdb") as store:
        for step in (1, 2):
            rollouts = [talk(turns, sample=i, step=step) for i, turns in enumerate(talks)]
            add_rollouts(store, *rollouts[: 1 + step])
        rows = store.rollouts(Split.TRAIN, 2, SUMMARISED_COLUMNS)
    assert conversation_metrics(rows, 5.0) == conversation_metrics(
        rows_of(talks, ["stop"] * 3), 5.0
    )
    assert summary(rows).conversations["environment/observed_tokens/mean"] == 1.0
