"""Turns of open conversations in the store go with their rollout, and no crash doubles any."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from refrain.engines.store import queries
from refrain.engines.store.store import Store
from refrain.engines.store.turns import RecordedTurn, by_sample, turn_rows
from refrain.schemas.rollout import Generated, RequestId, Split, Turn, VersionSpan
from tests.store.test_store import add_rollouts, make_rollout
from tests.store.test_turns import talk

TURNS = (Turn(2, 1, 0.5, None, 1, 0, 1e9, 3, 1), Turn(1))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "run.duckdb") as store:
        yield store


def turn(number: int = 0, *, step: int = 1, sample: int = 0, version: int = 0) -> RecordedTurn:
    id = RequestId(Split.TRAIN, step, "a", sample)
    spans = (VersionSpan(version, 1), VersionSpan(version + number, 1))
    part = Generated([5, 6, number], [-0.5, -0.25], spans, 3, 1, 2, 1, TURNS[:1])
    return RecordedTurn(id, number, part, f'{{"score": {number}}}')


def add(store: Store, *turns: RecordedTurn) -> None:
    assert store.add_turns(turn_rows(turns)) > 0.0


def known(store: Store) -> dict[tuple[int, int], list[RecordedTurn]]:
    """Return the open turns by step and index of their sample."""
    found = by_sample(store.open_turns())
    return {(id.step, id.sample_index): turns for id, turns in found.items()}


def plain(turns: list[RecordedTurn]) -> list[RecordedTurn]:
    """Return the turns with lists for arrays."""
    return [
        replace(
            one,
            part=replace(
                one.part,
                token_ids=list(one.part.token_ids),
                inference_logprobs=list(one.part.inference_logprobs),
            ),
        )
        for one in turns
    ]


def test_turns_come_back_in_order_and_a_repeated_one_replaces_the_rest(store: Store) -> None:
    add(store, turn(0), turn(0, sample=1))
    add(store, turn(1), turn(2))
    assert {key: plain(own) for key, own in known(store).items()} == {
        (1, 0): [turn(0), turn(1), turn(2)],
        (1, 1): [turn(0, sample=1)],
    }
    assert [one.part.turns[0].ended_s for one in known(store)[1, 0]] == [1e9] * 3
    add(store, turn(1, version=7))
    assert plain(known(store)[1, 0]) == [turn(0), turn(1, version=7)]
    assert by_sample(store.open_turns(Split.TRAIN, 2)) == {}
    assert len(by_sample(store.open_turns(Split.TRAIN, 1))) == 2


def test_turns_go_with_their_rollout_and_late_ones_are_left_out(store: Store) -> None:
    add(store, turn(0), turn(0, sample=1), turn(0, sample=2))
    finished = talk(TURNS, sample=0)
    deferred = talk(TURNS, sample=1)
    deferred = replace(deferred, request=deferred.request.deferred())
    add_rollouts(store, finished, deferred)
    assert [*known(store)] == [(1, 2)]
    add(store, turn(0), turn(0, sample=1), turn(1, sample=2))
    assert {key: len(turns) for key, turns in known(store).items()} == {(1, 2): 2}
    add_rollouts(store, talk(TURNS, sample=3))
    assert store._fetch("SELECT count(*) FROM open_turns") == [(2,)]


def test_a_crash_while_a_rollout_lands_loses_and_doubles_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, turn(0))
    with monkeypatch.context() as patch:
        patch.setattr(queries, "CLOSE_TURNS", f"{queries.CLOSE_TURNS}; SELECT error('crash')")
        with pytest.raises(Exception, match="crash"):
            add_rollouts(store, talk(TURNS))
    assert (store.rollouts(Split.TRAIN, 1).num_rows, len(known(store))) == (0, 1)
    assert [add_rollouts(store, talk(TURNS)) for _ in range(2)] == [1, 0]
    assert known(store) == {}


def test_going_back_keeps_the_turns_whose_rollouts_it_would_keep(store: Store) -> None:
    add(store, turn(0, step=1), turn(0, step=2), turn(1, step=2), turn(2, step=2))
    add(store, turn(0, step=3), turn(0, step=4, version=1), turn(0, step=4, sample=1, version=2))
    store.truncate_after(1, policy_version=1, max_staleness=1)
    # The last turn of step 2 is of version 2, and version 0 is too old for step 3.
    assert {key: len(own) for key, own in known(store).items()} == {(1, 0): 1, (2, 0): 2}
    store.truncate_after(1, policy_version=None)
    assert known(store) == {}


def test_an_older_store_gets_the_table(tmp_path: Path) -> None:
    path = tmp_path / "older.duckdb"
    with Store(path) as store:
        add_rollouts(store, make_rollout())
        store._con.execute("DROP TABLE open_turns")
    with Store(path) as store:
        add(store, turn(0, sample=1))
        assert [*known(store)] == [(1, 1)]
