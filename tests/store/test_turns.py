"""Conversations in the store: turns come back as they went in, and older stores go on."""

import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.histospec.worker import histories
from refrain.engines.learn.rollouts import read_rollouts
from refrain.engines.store import archive
from refrain.engines.store.actor import count_rows
from refrain.engines.store.archive import query_all
from refrain.engines.store.ddl import CREATE
from refrain.engines.store.open_database import RUN, connect
from refrain.engines.store.reader import answer
from refrain.engines.store.rows import rollout_rows
from refrain.engines.store.store import Store, open_read_only
from refrain.engines.store.tables import INDEXED, SCORING, TRAINING
from refrain.schemas.rollout import FinishReason, Rollout, Split, Turn, VersionSpan
from tests.store.test_store import add_rollouts, make_report, make_rewards, make_rollout

NEW_COLUMNS = ("turns", "observed_tokens", "environment_score", "entropy")
numbers = st.floats(-1e6, 1e6)
answered = st.builds(
    Turn,
    num_sampled=st.integers(1, 4),
    num_observed=st.integers(0, 4),
    waited_s=st.floats(0.0, 1e4),
    score=st.none() | numbers,
    num_calls=st.integers(0, 3),
    num_failed_calls=st.integers(0, 3),
)
last = answered | st.builds(Turn, st.integers(1, 4))
conversations = st.just(()) | st.builds(lambda own, end: (*own, end), st.lists(answered), last)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "run.duckdb") as store:
        yield store


def talk(turns: tuple[Turn, ...], score: float | None = None, **options: Any) -> Rollout:
    """Return a rollout with these turns, or one of three tokens without turns."""
    num_tokens = sum(turn.num_tokens for turn in turns) or 3
    num_sampled = sum(turn.num_sampled for turn in turns) or 3
    rollout = make_rollout(tokens=num_tokens, versions=[(0, num_sampled)], **options)
    generated = replace(
        rollout.generated,
        token_ids=list(range(10, 10 + num_tokens)),
        inference_logprobs=[-0.25 * at for at in range(num_sampled)],
        turns=turns,
        score=score,
    )
    return replace(rollout, generated=generated)


def reward_all(store: Store, rollouts: list[Rollout], step: int = 1) -> None:
    rows = [(one.id.prompt_key, one.id.sample_index, float(i)) for i, one in enumerate(rollouts)]
    store.add_rewards(Split.TRAIN, step, make_rewards(rows))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(conversations, st.none() | numbers), min_size=1, max_size=4))
def test_every_reader_has_the_turns(
    tmp_path_factory: pytest.TempPathFactory, given: list[tuple[tuple[Turn, ...], float | None]]
) -> None:
    rollouts = [talk(turns, score, sample=i) for i, (turns, score) in enumerate(given)]
    turns = [list(map(asdict, own)) for own, _ in given]
    with Store(tmp_path_factory.mktemp("store") / "run.duckdb") as store:
        add_rollouts(store, *rollouts)
        unscored = store.scoring_rows(Split.TRAIN, 1)
        reward_all(store, rollouts)
        indexed, trained = store.index_rows(Split.TRAIN, {"a": 1}), store.training_rows(1)
        rows = store.rollouts(Split.TRAIN, 1)
    for table, schema in ((unscored, SCORING), (indexed, INDEXED), (trained, TRAINING)):
        assert table.schema.equals(schema)
        assert table["turns"].to_pylist() == rows["turns"].to_pylist() == turns
        assert count_rows(table).num_tokens == sum(one.num_tokens for one in rollouts)
    assert rows["response_tokens"].to_pylist() == [one.num_tokens for one in rollouts]
    observed = [one.generated.num_observed for one in rollouts]
    assert rows["observed_tokens"].to_pylist() == observed
    assert rows["environment_score"].to_pylist() == [score for _, score in given]
    for one, found in zip(rollouts, read_rollouts(trained), strict=True):
        assert predicted(one) == found.token_ids[found.response_at].tolist()
        assert found.num_response_tokens == one.num_tokens
        assert found.inference_logprobs.tolist() == one.generated.inference_logprobs
    (history,) = histories(indexed)
    assert [own.tolist() for own in history.responses] == [
        list(one.generated.token_ids) for one in rollouts
    ]


def predicted(rollout: Rollout) -> list[int]:
    generated = rollout.generated
    return [generated.token_ids[at] for own in generated.sampled for at in own]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": (Turn(2, 3), Turn(3))}, "its turns do not cover its tokens"),
        ({"turns": (Turn(2, 3), Turn(5))}, "its turns do not cover its tokens"),
        ({"turns": (Turn(2, 3),)}, "its turns do not cover its tokens"),
        ({"turns": (Turn(2), Turn(3, 3), Turn(1))}, "a turn went on"),
        ({"turns": (Turn(6, 3), Turn(0))}, "a turn without a sampled token"),
        ({"turns": (Turn(2, -1), Turn(4, 4))}, "bad turns"),
        ({"turns": ()}, "not one logprob per token"),
        ({"turns": (Turn(2, 2), Turn(5))}, "not one logprob per token"),
        ({"inference_logprobs": [0.0] * 9}, "not one logprob per token"),
        ({"spans": (VersionSpan(0, 9),)}, "bad spans"),
        ({"score": float("nan")}, "bad score"),
        ({"turns": (Turn(2, 3, score=float("inf")), Turn(4))}, "bad score"),
    ],
)
def test_turns_that_contradict_the_tokens_are_a_bug(changes: dict, message: str) -> None:
    rollout = talk((Turn(2, 3), Turn(4)))
    rollout_rows([rollout])
    bad = replace(rollout, generated=replace(rollout.generated, **changes))
    with pytest.raises(AssertionError, match=f"train/1/a/0: {message}"):
        rollout_rows([bad])


def test_a_response_without_room_for_an_observation_is_truncated(store: Store) -> None:
    rollouts = [
        replace(talk((Turn(2, 1), Turn(1)), sample=i), finish_reason=reason)
        for i, reason in enumerate(FinishReason)
    ]
    add_rollouts(store, *rollouts)
    reward_all(store, rollouts)
    truncated = [one.truncated for one in read_rollouts(store.training_rows(1))]
    cut = {reason for reason, is_cut in zip(FinishReason, truncated, strict=True) if is_cut}
    assert cut == {FinishReason.LENGTH, FinishReason.CONTEXT}


# Stores of an earlier refrain


def write_older_store(path: Path, *rollouts: Rollout) -> None:
    """Write a store as it was before there were conversations."""
    create, num_removed = re.subn(rf"    ({'|'.join(NEW_COLUMNS)}) .*\n", "", CREATE)
    assert num_removed == len(NEW_COLUMNS)
    with connect(
        path, read_only=False, lock_timeout_s=0, format=replace(RUN, create=create)
    ) as con:
        rows = rollout_rows(rollouts).drop_columns(["prompt_token_ids", *NEW_COLUMNS])
        con.register("rows", rows.append_column("epoch", pa.array([0] * len(rows), pa.int32())))
        con.execute("INSERT INTO rollouts BY NAME FROM rows")
        con.execute("INSERT INTO prompts VALUES ('a', [1, 2])")


def columns_of(path: Path) -> set[str]:
    with connect(path, read_only=True, lock_timeout_s=0.0) as con:
        return set(con.sql("FROM rollouts").columns)


def test_an_older_store_goes_on(tmp_path: Path) -> None:
    path, old, new = tmp_path / "run.duckdb", talk(()), talk((Turn(1, 2), Turn(3)), 0.5, sample=1)
    write_older_store(path, old)
    assert not columns_of(path) & set(NEW_COLUMNS)
    with open_read_only(path) as store:
        (row,) = store.rollouts(Split.TRAIN, 1).to_pylist()
        assert row["response_tokens"] == 3
        assert [row[name] for name in NEW_COLUMNS] == [None] * len(NEW_COLUMNS)
        assert store.scoring_rows(Split.TRAIN, 1)["turns"].to_pylist() == [[]]
        assert store.index_rows(Split.TRAIN, {"a": 1}).num_rows == 0
    assert query_all(path, "SELECT count(turns) FROM rollouts").to_pylist()[0].popitem()[1] == 0
    with Store(path) as store:
        assert add_rollouts(store, old, new) == 1
        reward_all(store, [old, new])
        rows = store.rollouts(Split.TRAIN, 1, NEW_COLUMNS).to_pylist()
        assert [len(row["turns"]) for row in rows] == [0, 2]
        assert [row["observed_tokens"] for row in rows] == [0, 2]
        assert [row["environment_score"] for row in rows] == [None, 0.5]
        trained = read_rollouts(store.training_rows(1))
    assert trained[0].sampled is None
    assert trained[1].sampled is not None
    assert trained[1].sampled.tolist() == [True, False, False, True, True, True]
    assert set(NEW_COLUMNS) <= columns_of(path)


def test_turns_of_the_first_version_go_on(tmp_path: Path) -> None:
    """They lack the time of their end, and their drafts."""
    path, turn = tmp_path / "run.duckdb", Turn(2, 1, 0.5, None, 2, 1)
    create, num_removed = re.subn(r", ended_s .*?\)\[\]", ")[]", CREATE)
    assert num_removed == 1
    format = replace(RUN, create=create, added="")
    with connect(path, read_only=False, lock_timeout_s=0, format=format) as con:
        given = rollout_rows([talk((turn, Turn(3)))]).drop_columns(["prompt_token_ids"])
        con.register("rows", given.append_column("epoch", pa.array([0], pa.int32())))
        names = ("num_sampled", "num_observed", "waited_s", "score", "num_calls")
        fields = ", ".join(f"{name} := t.{name}" for name in (*names, "num_failed_calls"))
        older = f"[struct_pack({fields}) for t in turns] AS turns"
        con.execute(f"INSERT INTO rollouts BY NAME SELECT * REPLACE ({older}) FROM rows")
        con.execute("INSERT INTO prompts VALUES ('a', [1, 2])")
    with Store(path) as store:
        add_rollouts(store, talk((turn, Turn(3)), sample=1))
        old, new = store.rollouts(Split.TRAIN, 1, ["turns"])["turns"].to_pylist()
        assert [one["num_sampled"] for one in old] == [2, 3]
        assert [one["num_draft_tokens"] for one in (*old, *new)] == [None, None, 0, 0]
        assert store.timed_rollouts(Split.TRAIN, 1)["waits"].to_pylist() == [[], []]


@pytest.fixture
def old_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a store with an archived step whose file lacks the new columns."""
    monkeypatch.setattr(archive, "CHUNK_STEPS", 1)
    path = tmp_path / "run.duckdb"
    with Store(path) as store:
        add_rollouts(store, talk(()))
        reward_all(store, [talk(())])
        store.add_step(make_report(1))
        assert store.archive_before(1 + archive.KEPT_STEPS)
        file = tmp_path / "run.archive" / "000001" / "rollouts.parquet"
        without = f"SELECT * EXCLUDE ({', '.join(NEW_COLUMNS)}) FROM '{file}'"
        store._con.execute(f"CREATE TABLE older AS {without}")
        store._con.execute(f"COPY older TO '{file}' (FORMAT parquet); DROP TABLE older")
    return path


def test_steps_of_an_older_archive_are_read(old_archive: Path) -> None:
    conversation = talk((Turn(1, 2), Turn(3)), step=30)
    with Store(old_archive) as store:
        add_rollouts(store, conversation)
        (trained,) = read_rollouts(store.training_rows(1))
        assert trained.sampled is None
        assert store.index_rows(Split.TRAIN, {"a": 1})["turns"].to_pylist() == [[]]
        assert store.history_report().num_rollouts == 2
    query = "SELECT step, len(turns), observed_tokens FROM rollouts ORDER BY step"
    rows = answer(old_archive, query, 60.0).to_pylist()
    assert [tuple(row.values()) for row in rows] == [(1, None, None), (30, 2, 2)]
    with Store(old_archive) as store:
        store.truncate_after(0, 0)
        rows = store.rollouts(Split.TRAIN, 1, NEW_COLUMNS).to_pylist()
    assert rows == [{"turns": [], "observed_tokens": 0, "environment_score": None, "entropy": None}]


def test_a_conversation_leaves_with_its_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "CHUNK_STEPS", 1)
    conversation = talk((Turn(1, 2, 0.5, 1.0, 2, 1), Turn(3)), 0.25)
    with Store(tmp_path / "run.duckdb") as store:
        add_rollouts(store, conversation)
        reward_all(store, [conversation])
        before = store.training_rows(1), store.rollouts(Split.TRAIN, 1)
        assert store.archive_before(1 + archive.KEPT_STEPS)
        assert store._con.execute("SELECT count(*) FROM rollouts").fetchall() == [(0,)]
        assert (store.training_rows(1), store.rollouts(Split.TRAIN, 1)) == before


def test_waits_have_their_times(store: Store) -> None:
    """A turn of an earlier refrain, an answer at once and a turn without an answer are no waits."""
    turns = (
        Turn(1, 1, 2.5, ended_s=1e9),
        Turn(1, 1, 2.5),
        Turn(1, 0, 0.0, ended_s=2e9),
        Turn(1, 1, 0.5, ended_s=3e9),
        Turn(1, ended_s=4e9),
    )
    add_rollouts(store, talk(turns), talk((), sample=1))
    waits = [[1e9, 1e9 + 2.5], [3e9, 3e9 + 0.5]]
    assert store.timed_rollouts(Split.TRAIN, 1)["waits"].to_pylist() == [waits, []]
    assert sorted(one["waits"] for one in store.engine_times()) == [[], waits]


def test_the_history_of_lengths_has_the_waits_and_the_observed_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "CHUNK_STEPS", 1)
    waits_s = [(0.5, 2.0), (1.0,), ()]
    rollouts = [
        talk(tuple(Turn(1, 1, wait_s) for wait_s in own), sample=i) for i, own in enumerate(waits_s)
    ]
    with Store(tmp_path / "run.duckdb") as store:
        add_rollouts(store, *rollouts, talk((), prompt="b"))
        before = store.length_history()
        assert {key: of.mean_wait_s for key, of in before.items()} == {
            "a": pytest.approx(3.5 / 3),
            "b": 0.0,
        }
        # Samples of 2, 1 and 3 sampled tokens observe 2, 1 and 0.
        rates = {key: of.context_per_token for key, of in before.items()}
        assert rates == {"a": 1.5, "b": 1.0}
        assert store.archive_before(1 + archive.KEPT_STEPS)
        assert store.length_history() == before
        store._con.execute("UPDATE archived_groups SET waits_s = NULL, observed = NULL")
        old = store.length_history().values()
        assert {(of.mean_wait_s, of.observed_per_token) for of in old} == {(0.0, 0.0)}


def test_observed_tokens_fill_an_archive_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders are bounded by the tokens in their files."""
    monkeypatch.setattr(archive, "CHUNK_TOKENS", 10)
    with Store(tmp_path / "run.duckdb") as store:
        add_rollouts(store, talk((Turn(1, 8),)))
        assert not store.archive_before(1 + archive.KEPT_STEPS)
        add_rollouts(store, talk((Turn(1),), sample=1))
        assert store.archive_before(1 + archive.KEPT_STEPS)
