"""Traces keep their rows when written and read again. Errors name the row that is wrong."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from refrain.engines.simulate.trace import SCHEMA, TYPES, Trace, from_store, read_trace, write_trace
from refrain.engines.store.rows import rollout_rows
from refrain.engines.store.store import Store
from refrain.schemas.rollout import Split
from refrain.schemas.trace import REQUIRED, TraceRow
from tests.store.test_store import make_rewards, make_rollout

GOOD = {
    "step": [1, 1, 2, 2],
    "epoch": [0, 0, 1, 1],
    "prompt_key": ["a", "a", "b", "b"],
    "sample_index": [0, 1, 0, 1],
    "prompt_tokens": [2, 2, 1, 1],
    "response_tokens": [5, 7, 9, 2],
    "acceptance": [0.5, None, 1.0, 0.0],
    "reward": [1.0, 0.0, None, -1.0],
    "prompt_token_ids": [[1, 2], [1, 2], [3], [3]],
}


def turns(*numbers):
    """Return turns, from the tokens sampled and observed and the seconds waited in each."""
    return [
        dict(zip(("num_sampled", "num_observed", "waited_s"), own, strict=True)) for own in numbers
    ]


def changed(**columns) -> pa.Table:
    return pa.table({**GOOD, **columns})


def test_the_schema_is_the_documented_row():
    assert SCHEMA.names == list(TraceRow.model_fields) == list(TYPES)
    assert all(SCHEMA.field(name).nullable == (name not in REQUIRED) for name in SCHEMA.names)
    for row in Trace(changed(), "t").table.to_pylist():
        TraceRow(**row)


def test_written_and_read_again(tmp_path):
    trace = Trace(changed(), "t")
    write_trace(trace, tmp_path / "t.parquet")
    again = read_trace(tmp_path / "t.parquet")
    assert again.table.equals(trace.table)
    assert "response_token_ids" not in pq.read_schema(tmp_path / "t.parquet").names
    assert again.steps == (1, 2)
    assert again.step(2).column("response_tokens").tolist() == [9, 2]


def test_optional_columns_may_lack_and_others_may_be_there():
    table = pa.table({name: GOOD[name] for name in REQUIRED} | {"mood": ["x"] * 4})
    trace = Trace(table, "t")
    assert trace.table.column_names == SCHEMA.names
    assert np.isnan(trace.column("reward")).all()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"response_tokens": [5, 7, -1, 2]}, "t, row 3, has response_tokens below 1: correct"),
        ({"prompt_tokens": [2, 0, 1, 1]}, "t, row 2, has prompt_tokens below 1"),
        ({"sample_index": [0, 0, 0, 1]}, "t, row 2, repeats step 1, prompt_key a, sample_index 0"),
        ({"step": [1, 1, None, 2]}, "t, row 3, has no step: fill it in"),
        ({"prompt_key": ["a", "a", "b", ""]}, "t, row 4, has an empty prompt_key"),
        ({"acceptance": [0.5, 1.5, None, 0.1]}, "t, row 2, has acceptance outside 0..1"),
        ({"acceptance": [0.5, float("nan"), None, 0.1]}, "row 2, has acceptance outside"),
        ({"reward": [1.0, 2.0, float("inf"), 0.0]}, "t, row 3, has a reward that is not finite"),
        ({"prompt_token_ids": [[1, 2], [1], [3], [3]]}, "t, row 2, has prompt_tokens unlike"),
        ({"turns": [None, None, None, turns((1, 3, 0.5))]}, "row 4, has response_tokens unlike"),
        ({"turns": [None, turns((7, 0, -0.5)), None, None]}, "row 2, has a turn without"),
        ({"turns": [turns((0, 3, 0.5), (5, None, 0.0)), None, None, None]}, "row 1, has a turn"),
        ({"response_tokens": ["x"] * 4}, "t, column 'response_tokens', is string where int64"),
        ({"response_tokens": [1.5] * 4}, "t, column 'response_tokens', is double where int64"),
    ],
)
def test_wrong_rows_are_named(columns, message):
    with pytest.raises(ValueError, match=message):
        Trace(changed(**columns), "t")


def test_no_rows_and_no_columns():
    with pytest.raises(ValueError, match="t is empty: a trace has a row for every rollout"):
        Trace(SCHEMA.empty_table(), "t")
    with pytest.raises(ValueError, match="t is not a trace: it lacks the column 'epoch'"):
        Trace(changed().drop_columns(["epoch"]), "t")
    with pytest.raises(ValueError, match="t has no step 3: its steps are 1 to 2"):
        Trace(changed(), "t").step(3)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.parquet does not exist"):
        read_trace(tmp_path / "nowhere.parquet")
    (tmp_path / "x").write_text("step,epoch")
    with pytest.raises(ValueError, match="x is not a Parquet file"):
        read_trace(tmp_path / "x")


def test_history_is_the_median_of_the_last_time():
    table = pa.table(
        {
            "step": [1, 1, 1, 2, 3, 3, 4],
            "epoch": [0, 0, 0, 0, 1, 1, 1],
            "prompt_key": ["a", "a", "a", "b", "a", "a", "b"],
            "sample_index": [0, 1, 2, 0, 0, 1, 0],
            "prompt_tokens": [1] * 7,
            "response_tokens": [9, 1, 5, 4, 10, 20, 6],
        }
    )
    trace = Trace(table, "t")
    assert trace.history(1) == {}
    assert trace.history(3) == {"a": 5.0, "b": 4.0}
    assert trace.history(4) == {"a": 15.0, "b": 4.0}
    assert trace.history(9) == {"a": 15.0, "b": 6.0}


def test_a_store_becomes_a_trace(tmp_path):
    path = tmp_path / "refrain.duckdb"
    with Store(path) as store:
        store.add_rollouts(
            rollout_rows([make_rollout(sample=s, tokens=3 + s) for s in range(2)]), epoch=0
        )
        store.add_rollouts(rollout_rows([make_rollout(split=Split.VALIDATION)]), epoch=0)
        store.add_rewards(Split.TRAIN, 1, make_rewards([("a", 0, 1.0), ("a", 1, 0.5)]))
    trace = from_store(path, token_ids=True)
    assert trace.table.to_pylist()[1] == {
        "step": 1,
        "epoch": 0,
        "prompt_key": "a",
        "sample_index": 1,
        "prompt_tokens": 2,
        "response_tokens": 4,
        "acceptance": 0.5,
        "reward": 0.5,
        "prompt_token_ids": [1, 2],
        "response_token_ids": [7, 7, 7, 7],
        "turns": None,
    }
    assert len(trace) == 2
    assert from_store(path).table["response_token_ids"].null_count == 2


def test_stores_without_rollouts(tmp_path):
    Store(tmp_path / "empty.duckdb").close()
    with pytest.raises(ValueError, match="has no finished rollouts of split train: let the run"):
        from_store(tmp_path / "empty.duckdb")
    with pytest.raises(ValueError, match="does not exist"):
        from_store(tmp_path / "none.duckdb")
