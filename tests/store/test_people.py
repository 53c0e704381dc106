"""SQL of people: it reads all steps, and does nothing else."""

import pytest

from engines.store import archive, people
from engines.store.store import Store, open_read_only
from tests.store.test_archive import NUM_STEPS, add_step

TIMEOUT_S = 60.0


@pytest.fixture(params=["live", "ended"])
def store(request, tmp_path, monkeypatch):
    """Of a long run, most steps of which have left the database."""
    monkeypatch.setattr(archive, "CHUNK_STEPS", 5)
    path = tmp_path / "run.duckdb"
    with Store(path) as store:
        for step in range(1, NUM_STEPS + 1):
            add_step(store, step)
            store.archive_before(step)
        if request.param == "live":
            yield store
            return
    with open_read_only(path) as store:
        yield store


def ask(store, query):
    return [tuple(row.values()) for row in store.ask(query, TIMEOUT_S).to_pylist()]


def test_old_steps_are_there(store):
    ((num, first, last),) = ask(
        store, "SELECT count(DISTINCT step), min(step), max(step) FROM plans"
    )
    assert (num, first, last) == (NUM_STEPS, 1, NUM_STEPS)
    every = "SELECT count(*) FROM rollouts WHERE split = 'train'"
    assert ask(store, every) == [(4 * NUM_STEPS,)]
    named = "WITH long AS (FROM rollouts WHERE response_tokens = 9) SELECT count(*) FROM long"
    assert ask(store, named) == [(NUM_STEPS,)]


def test_views_for_people(store):
    ((step, epoch, name, value),) = ask(
        store, "FROM step_metrics WHERE step = 3 AND name = 'critic/score/mean'"
    )
    assert (step, epoch, name, value) == (3, 0, "critic/score/mean", 0.5)
    rates = ask(store, "SELECT DISTINCT engine, acceptance_rate FROM acceptance")
    assert rates == [(0, 0.5)]
    (row,) = ask(
        store,
        "SELECT num_samples, min_tokens, median_tokens, max_tokens, reward_mean FROM lengths "
        "WHERE split = 'train' AND step = 7 AND num_samples = 2",
    )
    assert row == (2, 3, 3.0, 3, 7 / 8)


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("DELETE FROM rollouts", "one query that reads"),
        ("DROP TABLE rollouts", "one query that reads"),
        ("COPY rollouts TO 'stolen.csv'", "one query that reads"),
        ("SELECT 1; SELECT 2", "one query that reads"),
        ("", "one query that reads"),
        ("SET threads = 64", "one query that reads"),
        ("EXPLAIN ANALYZE DELETE FROM steps", "read-only"),
        ("SELEC 1", "syntax error"),
        ("SELECT nothing FROM rollouts", "nothing"),
        ("FROM nowhere", "nowhere"),
    ],
)
def test_what_does_more_than_read_is_refused(store, query, why):
    with pytest.raises(ValueError, match=why):
        store.ask(query, TIMEOUT_S)
    assert ask(store, "SELECT count(*) FROM steps") == [(NUM_STEPS,)]


def test_a_query_ends_in_time(store):
    with pytest.raises(ValueError, match=r"no answer within 0\.2 s"):
        store.ask("SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b", 0.2)
    assert ask(store, "SELECT 1") == [(1,)]


def test_an_answer_is_bounded(store, monkeypatch):
    monkeypatch.setattr(people, "MAX_BYTES", 2**20)
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        store.ask("FROM range(1000000)", TIMEOUT_S)
    assert len(ask(store, "FROM range(1000)")) == 1000
