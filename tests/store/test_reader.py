"""SQL queries of users see all steps, give the same answers for live and ended runs, and can only
read."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from shutil import copytree

import duckdb
import pyarrow as pa
import pytest

from refrain.engines.store import archive, reader
from refrain.engines.store.archive import Archive
from refrain.engines.store.listener import Needed, Snapshot, listen
from refrain.engines.store.open_database import connect
from refrain.engines.store.reader import answer, answers, fetch_rows
from refrain.engines.store.store import Store
from tests.store.test_archive import NUM_STEPS, add_step
from tests.store.test_listener import all_served

TIMEOUT_S = 60.0
KINDS = ("live", "ended")
OF_TABLES = ("table", "table_macro", "pragma")
QUERIES = (
    "SELECT count(DISTINCT step), min(step), max(step) FROM plans",
    "SELECT count(*) FROM rollouts",
    "FROM rollouts",
    "FROM main.rollouts",
    "FROM step_metrics WHERE step = 3",
    "FROM acceptance",
    "FROM lengths",
    "FROM prompts",
    "SELECT name, first_step FROM archives, meta",
    "DESCRIBE rollouts",
    "SHOW TABLES",
    "SELECT step, response_token_ids FROM rollouts WHERE step = 24",
    "SELECT step, response_token_ids FROM rollouts WHERE step = 24 OR step = 2",
    "SELECT step, response_token_ids FROM rollouts WHERE step NOT IN (3, 24)",
    "SELECT step FROM rollouts WHERE step > 3 AND step <= 20 AND split = 'train' AND epoch = 1",
    "SELECT step FROM rollouts WHERE step BETWEEN 3 AND 24 AND split = 'validation'",
    "SELECT count(*) FROM rollouts WHERE step = 23 AND prompt_key LIKE 'a%'",
    "SELECT a.step, b.step, a.median_tokens FROM lengths a JOIN lengths b "
    "ON a.prompt_key = b.prompt_key AND a.step = b.step + 1 WHERE a.step = 24",
    "SELECT r FROM rollouts r",
    "SELECT COLUMNS('.*tokens') FROM rollouts",
    "SELECT unnest(response_token_ids) FROM rollouts WHERE step = 24",
    "SELECT version_spans[1].num_tokens, report->'metrics' FROM rollouts JOIN steps USING (step)",
    "SELECT turns[1].num_observed, observed_tokens, environment_score FROM rollouts",
    "SELECT (SELECT max(step) FROM rollouts), (SELECT count(*) FROM rewards)",
    "WITH x AS MATERIALIZED (FROM rollouts WHERE step = 24) "
    "SELECT x.step, reward FROM x JOIN rewards USING (split, step, prompt_key, sample_index)",
    "WITH RECURSIVE r AS (SELECT 22 AS x UNION ALL SELECT x + 1 FROM r, steps WHERE x = step) "
    "FROM r",
    "SELECT step FROM rollouts WHERE step > 20 INTERSECT SELECT step FROM rewards WHERE step < 23",
    "PIVOT rollouts ON engine IN (0, 1) USING count(*) GROUP BY step",
    "SELECT * FROM query('SELECT step FROM rollouts')",
    "SELECT count(*) FROM steps WHERE EXISTS (FROM rewards r WHERE r.step = steps.step)",
    "SELECT nothing FROM rollouts",
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Return the stores of a long run, live and ended. Most of its steps are in the archive."""
    directory = tmp_path_factory.mktemp("runs")
    found = {kind: directory / kind / "refrain.duckdb" for kind in KINDS}
    found["ended"].parent.mkdir()
    with pytest.MonkeyPatch.context() as patch, Store(found["ended"]) as store:
        patch.setattr(archive, "CHUNK_STEPS", 5)
        for step in range(1, NUM_STEPS + 1):
            add_step(store, step)
            store.archive_before(step)
    copytree(found["ended"].parent, found["live"].parent)
    with Store(found["live"]) as store:
        listen(found["live"].parent, store.snapshot)
        yield found
        all_served()


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Path:
    return paths[request.param]


def ask(path: Path, query: str) -> list[tuple]:
    table = answer(path, query, TIMEOUT_S)
    return [*zip(*(column.to_pylist() for column in table.columns), strict=True)]


def test_old_steps_are_there(path: Path) -> None:
    ((num, first, last),) = ask(
        path, "SELECT count(DISTINCT step), min(step), max(step) FROM plans"
    )
    assert (num, first, last) == (NUM_STEPS, 1, NUM_STEPS)
    every = "SELECT count(*) FROM rollouts WHERE split = 'train'"
    assert ask(path, every) == [(4 * NUM_STEPS,)]
    named = "WITH long AS (FROM rollouts WHERE response_tokens = 9) SELECT count(*) FROM long"
    assert ask(path, named) == [(NUM_STEPS,)]


def test_views_for_people(path: Path) -> None:
    ((step, epoch, name, value),) = ask(
        path, "FROM step_metrics WHERE step = 3 AND name = 'critic/score/mean'"
    )
    assert (step, epoch, name, value) == (3, 0, "critic/score/mean", 0.5)
    rates = ask(path, "SELECT DISTINCT engine, acceptance_rate FROM acceptance")
    assert rates == [(0, 0.5)]
    (row,) = ask(
        path,
        "SELECT num_samples, min_tokens, median_tokens, max_tokens, reward_mean FROM lengths "
        "WHERE split = 'train' AND step = 7 AND num_samples = 2",
    )
    assert row == (2, 3, 3.0, 3, 7 / 8)


@pytest.mark.parametrize("query", QUERIES)
def test_a_live_run_answers_as_one_that_has_ended(paths: dict[str, Path], query: str) -> None:
    found = {}
    for kind, path in paths.items():
        try:
            found[kind] = sorted(map(str, ask(path, query)))
        except ValueError as error:
            found[kind] = str(error).splitlines()[0]
    assert found["live"] == found["ended"]
    assert found["ended"]


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("DELETE FROM rollouts", "one query that reads"),
        ("DROP TABLE rollouts", "one query that reads"),
        ("COPY rollouts TO 'NEW'", "one query that reads"),
        ("SELECT 1; SELECT 2", "one query that reads"),
        ("", "one query that reads"),
        ("SET threads = 64", "one query that reads"),
        ("ATTACH 'NEW'", "one query that reads"),
        ("PRAGMA force_checkpoint", "one query that reads"),
        ("CALL checkpoint()", "one query that reads"),
        ("INSTALL httpfs", "one query that reads"),
        ("LOAD 'NEW'", "one query that reads"),
        ("EXPORT DATABASE 'NEW'", "one query that reads"),
        ("EXPLAIN ANALYZE DELETE FROM steps", "one query that reads"),
        ("EXPLAIN ANALYZE COPY (SELECT 42) TO 'NEW'", "one query that reads"),
        ("/* */ explain -- \n analyze/**/copy (SELECT 42) TO 'NEW'", "syntax error"),
        ("EXPLAIN (ANALYZE, FORMAT json) COPY (SELECT 42) TO 'NEW'", "one query that reads"),
        ("EXPLAIN ANALYZE (FORMAT json) COPY (SELECT 42) TO 'NEW'", "one query that reads"),
        ("WITH x AS (COPY (SELECT 42) TO 'NEW') SELECT 1", "Permission"),
        ("WITH x AS (COPY (SELECT 42) TO 'ARCHIVED' (USE_TMP_FILE false)) SELECT 1", "reads"),
        ("EXPLAIN ANALYZE WITH x AS (COPY steps TO 'ARCHIVED' (USE_TMP_FILE 0)) FROM x", "reads"),
        ("WITH x AS (DELETE FROM main.steps RETURNING *) FROM x", "read-only|base table"),
        ("FROM read_text('/etc/passwd')", "Permission"),
        ("FROM '/etc/passwd'", "does not exist"),
        ("SELECT getenv('HOME')", "getenv"),
        ("SELEC 1", "syntax error"),
        ("SELECT nothing FROM rollouts", "nothing"),
        ("FROM nowhere", "nowhere"),
    ],
)
def test_queries_that_write_are_refused(path: Path, tmp_path: Path, query: str, why: str) -> None:
    archived = path.parent / "refrain.archive" / "000001" / "rollouts.parquet"
    before = archived.read_bytes()
    query = query.replace("NEW", str(tmp_path / "file")).replace("ARCHIVED", str(archived))
    with pytest.raises(ValueError, match=why):
        answer(path, query, TIMEOUT_S)
    assert archived.read_bytes() == before
    assert [*tmp_path.iterdir()] == []
    assert ask(path, "SELECT count(*) FROM steps") == [(NUM_STEPS,)]


@pytest.mark.parametrize(
    "query",
    [
        "EXPLAIN FROM lengths",
        "EXPLAIN (SELECT 1)",
        "explain analyze SELECT 1",
        "EXPLAIN (ANALYZE, FORMAT json) FROM rollouts",
        "EXPLAIN (FORMAT json) (SELECT 1)",
        "SUMMARIZE rewards",
    ],
)
def test_queries_that_read_are_answered(path: Path, query: str) -> None:
    assert ask(path, query)


def calls(functions: list[tuple[str, str]], secret: Path, new: Path) -> Iterator[str]:
    arguments = ([], [secret], [secret.parent / "*"], [secret, secret], [new], [new, secret, 1])
    for name, kind in functions:
        for some in arguments:
            call = f"{name}({', '.join(repr(str(one)) for one in some)})"
            yield f"SELECT {'* FROM ' if kind in OF_TABLES else ''}{call} LIMIT 5"


def leaks(con: duckdb.DuckDBPyConnection, queries: Iterator[str], words: list[str]) -> list[str]:
    """Return the queries whose results or errors contain one of these words."""
    found = []
    for query in queries:
        try:
            shown = str(con.sql(query).fetchall())
        except Exception as error:  # No error may contain them either.
            shown = str(error)
        if any(word in shown for word in words):
            found.append(query)
    return found


def test_no_function_reaches_a_file(paths: dict[str, Path], tmp_path: Path) -> None:
    """Try every function of this DuckDB on a file's path, a pattern and a new path."""
    secret = tmp_path / "private" / "plan.json"
    secret.parent.mkdir()
    secret.write_text('{"hunter2": 1}\n')
    new = secret.with_name("new.json")
    with closing(connect(paths["ended"], read_only=True, lock_timeout_s=0.0)) as con:
        assert leaks(con, iter([f"FROM read_text('{secret}')"]), ["hunter2"])
        reader._lock(con, Archive(paths["ended"]).show_all(con))
        rows = con.execute("SELECT DISTINCT function_name, function_type FROM duckdb_functions()")
        functions = [row for row in rows.fetchall() if row[0].isidentifier()]
        assert len(functions) > 700
        con.execute("BEGIN TRANSACTION READ ONLY")
        assert leaks(con, calls(functions, secret, new), ["hunter2"]) == []
        assert leaks(con, calls([("glob", "table")], secret, new), ["[('" + str(secret)]) == []
    assert [*secret.parent.iterdir()] == [secret]


def test_no_setting_can_be_changed(paths: dict[str, Path]) -> None:
    with closing(reader._open_ended(paths["ended"])) as con:
        for name, value in (
            ("enable_external_access", True),
            ("allowed_paths", ["/etc"]),
            ("allowed_configs", ["threads"]),
            ("memory_limit", "1TB"),
            ("temp_directory", "/tmp"),
        ):
            with pytest.raises(duckdb.Error, match="locked"):
                con.execute(f"SET {name} = ?", [value])


def test_queries_of_two_threads_take_turns(paths: dict[str, Path]) -> None:
    """A browser asks for several pages at once."""
    path, count = paths["ended"], "SELECT count(*) AS num FROM rollouts"
    with ThreadPoolExecutor(1) as other, answers(path, TIMEOUT_S, fetch_rows) as read:
        (before,) = read(count)
        with pytest.raises(ValueError, match="other queries took"):
            answer(path, count, 0.1)
        waiting = other.submit(answer, path, count, TIMEOUT_S)
        assert wait([waiting], timeout=0.2).not_done
        assert read(count) == [before]
    assert waiting.result().to_pylist() == [before]


def test_an_answer_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_BYTES", 2**20)
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        answer(path, "FROM range(1000000)", TIMEOUT_S)
    assert len(ask(path, "FROM range(1000)")) == 1000


def test_a_live_run_is_asked_for_what_is_needed(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    read = Snapshot.read

    def spy(self: Snapshot, needed: dict[str, Needed]) -> Iterator[pa.RecordBatchReader]:
        asked.append(needed)
        return read(self, needed)

    monkeypatch.setattr(Snapshot, "read", spy)
    ask(paths["live"], "SELECT len(response_token_ids) FROM rollouts WHERE step = 24 AND epoch > 1")
    (needed,) = asked[-1].values()
    assert set(needed.columns) == {"step", "epoch", "response_token_ids"}
    assert needed.where == ((("step", "=", 24), ("epoch", ">", 1)),)
    monkeypatch.setattr(reader, "_needed", lambda *_: {})
    with pytest.raises(ValueError, match="not fetched"):
        ask(paths["live"], "SELECT count(*) FROM steps")
