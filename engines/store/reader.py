"""The process that runs one SQL query of a user. It can read a run's store and nothing else.

    python -m refrain.engines.store.reader < request (JSON) > answer (Arrow)

A query reads these tables and views:

    rollouts, rewards, plans, outcomes      as in engines.store.tables, archived steps included
    steps, step_metrics, acceptance, lengths

Tables come from the store's process while the run is live (`engines.store.listener`), otherwise
from the run's database. Archived steps come from the archive's files. DuckDB cannot open any other
file. A query that takes too much memory or time ends only this process, not the run.
"""

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import duckdb

from refrain.engines.store.archive import Archive
from refrain.engines.store.listener import Condition, Needed, Snapshot, live_snapshot, quoted
from refrain.engines.store.open_database import OPTIONS, connect
from refrain.engines.store.sandbox import REFUSED, limit_process

if TYPE_CHECKING:  # `refrain samples` answers before it could load pyarrow.
    import pyarrow as pa

MAX_BYTES = 256 * 2**20
"""Size of the largest answer. The calling process holds the answer in memory."""
_MAX_ERROR = 10_000
"""Characters of the longest error message. DuckDB may repeat data in it."""
_ENDED = threading.Lock()
_ROWS_AT_A_TIME = 1024
_FEW_ROWS = 64
_VALUE_BYTES = 8
"""Size of a list's item in Python."""
_READS_ONLY = "give one query that reads, for example SELECT .. or DESCRIBE rollouts"
_TOO_LARGE = (
    f"the query needs more than {OPTIONS['memory_limit']} of memory: ask for fewer rows or "
    "columns, or aggregate them"
)
_EXPLAIN = re.compile(
    r"^EXPLAIN\b(\s*ANALYZE\b)?(\s*\((\s*(ANALYZE|FORMAT\s+\w+)\s*,?)+\))?", re.IGNORECASE
)
_WRITES = re.compile("COPY|INSERT|UPDATE|DELETE|MERGE")
"""Names of plan operators that write. A query that starts with WITH may contain one."""
_ONE = r"\((step|epoch|split) (=|<=?|>=?) (?:(-?\d+)|'(\w+)')\)"
_ATOM = rf"(?:{_ONE}|\(step IN \((?:CAST\(-?\d+ AS INTEGER\)(?:, )?)+\)\))"
_CONDITION = re.compile(_ONE)
"""A filter of a DuckDB plan that the live store can apply."""
_ALL_OF = re.compile(rf"\(*{_ATOM}(?:\)* AND \(*{_ATOM})*\)*")
"""Several of them that must all hold, perhaps with a list of steps."""
_NOT_FETCHED = "the query reads a column that was not fetched. This is a bug: report the query"
_MISSING = f"error('{_NOT_FETCHED}')"

VIEWS = {
    "step_metrics": """
        SELECT step, epoch, metric.key AS name, metric.value AS value
        FROM (
            SELECT step, epoch, unnest(map_entries(
                from_json(report -> 'metrics', '"MAP(VARCHAR, DOUBLE)"')
            )) AS metric
            FROM steps
        )
    """,
    "acceptance": """
        SELECT
            split, step, epoch, engine, drafter,
            sum(num_draft_tokens) AS num_draft_tokens,
            sum(num_accepted_tokens) AS num_accepted_tokens,
            sum(num_verifications) AS num_verifications,
            sum(num_accepted_tokens) / nullif(sum(num_draft_tokens), 0) AS acceptance_rate
        FROM rollouts GROUP BY ALL
    """,
    "lengths": """
        SELECT
            split, step, epoch, prompt_key,
            count(*) AS num_samples,
            min(response_tokens) AS min_tokens,
            median(response_tokens) AS median_tokens,
            max(response_tokens) AS max_tokens,
            avg(reward) AS reward_mean
        FROM rollouts LEFT JOIN rewards USING (split, step, prompt_key, sample_index)
        GROUP BY ALL
    """,
}
"""Views for users.

`step_metrics`: one row per step and metric. `acceptance`: one row per step, engine and drafter.
`lengths`: one row per step and prompt.
"""


Answer = TypeVar("Answer")
Fetch = Callable[[duckdb.DuckDBPyConnection, str], Answer]
"""Runs a query and reads its whole answer."""


class Operator(NamedTuple):
    """An operator of a query's plan."""

    name: str
    info: Mapping[str, Any]

    def listed(self, name: str) -> list[str]:
        info = self.info.get(name, [])
        return info if isinstance(info, list) else [info]

    def conditions(self) -> tuple[Condition, ...]:
        """Return the filters of this scan that the live store can apply."""
        found = (_ALL_OF.fullmatch(text) for text in self.listed("Filters"))
        return tuple(
            (column, operator, int(number) if number else text)
            for match in found
            if match
            for column, operator, number, text in _CONDITION.findall(match[0])
        )


def answer(path: Path, query: str, timeout_s: float) -> "pa.Table":
    """Return the answer to one query on the store at `path`.

    Raise ValueError when the query writes, when DuckDB refuses it, when its answer has more than
    `MAX_BYTES`, or when it takes longer than `timeout_s` seconds.
    """
    with answers(path, timeout_s, fetch_table) as ask:
        return ask(query)


@contextmanager
def answers(
    path: Path, timeout_s: float, fetch: Fetch[Answer]
) -> Generator[Callable[[str], Answer]]:
    """Yield a function that answers queries as `answer` does, all on the data of one moment.

    Keep the block short. A live store keeps this data until it ends, and an ended run cannot be
    resumed during it.
    """
    run = partial(_read_only, fetch, timeout_s)
    try:
        with live_snapshot(path.parent, timeout_s) as live:
            if live:
                yield lambda query: _answer_live(path, live, query, run)
            else:
                with _alone(timeout_s), closing(_open_ended(path)) as con:
                    yield lambda query: _answer_ended(con, query, run)
    except duckdb.OutOfMemoryException as error:
        raise ValueError(_TOO_LARGE) from error
    except duckdb.InterruptException as error:
        raise ValueError(f"no answer within {timeout_s:g} s: ask for less") from error
    except duckdb.Error as error:
        raise ValueError(str(error)) from error


def _answer_ended(con: duckdb.DuckDBPyConnection, query: str, run: Fetch[Answer]) -> Answer:
    _plan(con, _checked(con, query))
    return run(con, query)


def _answer_live(path: Path, live: Snapshot, query: str, run: Fetch[Answer]) -> Answer:
    with closing(_open_live(path, live)) as con:
        plan = _plan(con, _checked(con, query))
        needed = _needed(plan, live)
        _load(con, live, needed, live.columns)
        try:
            return run(con, query)
        except duckdb.InvalidInputException as error:
            if _NOT_FETCHED not in str(error):
                raise
        # DuckDB may read a column that its plan does not list, as in EXISTS (FROM rollouts).
        _load(con, live, {table: Needed(tuple(live.columns[table])) for table in needed}, needed)
        return run(con, query)


def _checked(con: duckdb.DuckDBPyConnection, query: str) -> str:
    """Return the query's statement without EXPLAIN.

    Raise ValueError unless the query is a single SELECT or a statement like it.
    """
    statements = con.extract_statements(query)
    if len(statements) != 1:
        raise ValueError(_READS_ONLY)
    (statement,) = statements
    if statement.type == duckdb.StatementType.EXPLAIN:
        return _checked(con, _EXPLAIN.sub("", statement.query, count=1))
    if statement.type != duckdb.StatementType.SELECT:
        raise ValueError(_READS_ONLY)
    return statement.query


@contextmanager
def _alone(timeout_s: float) -> Generator[None]:
    """Wait until no other thread has an ended run open. Raise ValueError after `timeout_s` seconds.

    All connections of a process to one file share their settings, which the first one locks.
    """
    if not _ENDED.acquire(timeout=timeout_s):
        raise ValueError(f"other queries took {timeout_s:g} s: ask again")
    try:
        yield
    finally:
        _ENDED.release()


def _open_ended(path: Path) -> duckdb.DuckDBPyConnection:
    """Open the database of an ended run. The connection reaches nothing else."""
    con = connect(path, read_only=True, lock_timeout_s=0.0)
    archive = Archive(path)
    archive.check(con)
    _lock(con, archive.show_all(con))
    return con


def _open_live(path: Path, live: Snapshot) -> duckdb.DuckDBPyConnection:
    """Open an empty database with the tables of a live run. It reaches the archive alone.

    The store sends the data before the query runs, so the query does not block the store.
    """
    con = duckdb.connect(config=OPTIONS)
    con.execute("CREATE SCHEMA live")
    for table, columns in live.columns.items():
        typed = ", ".join(f"{quoted(name)} {kind}" for name, kind in columns.items())
        con.execute(f"CREATE TABLE live.{quoted(table)} ({typed})")
        con.execute(f"CREATE VIEW {quoted(table)} AS FROM live.{quoted(table)}")
    _load(con, live, {"archives": Needed(tuple(live.columns["archives"]))}, ["archives"])
    _lock(con, Archive(path).show_all(con))
    return con


def _lock(con: duckdb.DuckDBPyConnection, files: list[Path]) -> None:
    """Allow this connection to open only these files, and lock this setting."""
    for name, view in VIEWS.items():
        con.execute(f"CREATE TEMP VIEW {name} AS {view}")
    con.execute("SET temp_directory = ''; SET allow_persistent_secrets = false")
    con.execute("SET allowed_paths = ?", [[str(file) for file in files]])
    con.execute("SET allowed_configs = ['disabled_optimizers']")
    con.execute("SET enable_external_access = false; SET lock_configuration = true")


def _plan(con: duckdb.DuckDBPyConnection, query: str) -> list[Operator]:
    """Return the operators of the query's plan. Raise ValueError when one of them writes.

    DuckDB runs two optimizers only: one drops unused columns, the other moves filters to the scans.
    """
    kept = ("unused_columns", "filter_pushdown")
    names = [name for (name,) in con.execute("FROM duckdb_optimizers()").fetchall()]
    off = ",".join(name for name in names if name not in kept)
    con.execute(f"SET disabled_optimizers = '{off}'")
    ((_, plan),) = con.execute(f"EXPLAIN (FORMAT json) {query}").fetchall()
    con.execute("RESET disabled_optimizers")
    operators = list(_walk(json.loads(plan)))
    if any(_WRITES.search(operator.name) for operator in operators):
        raise ValueError(_READS_ONLY)
    return operators


def _walk(nodes: list[dict[str, Any]]) -> Iterator[Operator]:
    for node in nodes:
        yield Operator(node["name"], node["extra_info"])
        yield from _walk(node["children"])


def _needed(plan: list[Operator], live: Snapshot) -> dict[str, Needed]:
    """Return the columns and rows of a live run that the query reads, by table."""
    scans: dict[str, list[Operator]] = {}
    for operator in plan:
        if "Table" in operator.info:
            table = operator.info["Table"].rpartition(".")[2].strip('"')
            scans.setdefault(table, []).append(operator)
    return {table: _of_table(live.columns[table], found) for table, found in scans.items()}


def _of_table(columns: Iterable[str], scans: list[Operator]) -> Needed:
    shown = (text for scan in scans for text in scan.listed("Projections") + scan.listed("Filters"))
    words = set(re.findall(r"\w+", " ".join(shown)))
    where = [scan.conditions() for scan in scans]
    return Needed(
        columns=tuple(name for name in columns if name in words) or tuple(columns)[:1],
        where=tuple(where) if all(where) else (),
    )


def _load(
    con: duckdb.DuckDBPyConnection,
    live: Snapshot,
    needed: dict[str, Needed],
    tables: Iterable[str],
) -> None:
    """Fetch the needed rows of a live run. Reading a column that was not fetched is an error."""
    for table, reader in zip(needed, live.read(needed), strict=True):
        con.register("arriving", reader)
        con.execute(f"CREATE OR REPLACE TABLE live.{quoted(table)} AS FROM arriving")
        con.unregister("arriving")
    for table in tables:
        fetched = needed[table].columns if table in needed else ()
        columns = ", ".join(
            f"{quoted(name) if name in fetched else _MISSING}::{kind} AS {quoted(name)}"
            for name, kind in live.columns[table].items()
        )
        rows = f"live.{quoted(table)}" if fetched else f"(SELECT 1) WHERE {_MISSING}::BOOLEAN"
        view = f"memory.main.{quoted(table)}"
        con.execute(f"CREATE OR REPLACE VIEW {view} AS SELECT {columns} FROM {rows}")


def _read_only(
    fetch: Fetch[Answer], timeout_s: float, con: duckdb.DuckDBPyConnection, query: str
) -> Answer:
    """Fetch in a transaction in which DuckDB refuses any statement that would write."""
    with _interrupted_after(timeout_s, con):
        con.execute("BEGIN TRANSACTION READ ONLY")
        try:
            return fetch(con, query)
        finally:
            con.execute("ROLLBACK")


def fetch_table(con: duckdb.DuckDBPyConnection, query: str) -> "pa.Table":
    import pyarrow as pa

    batches, num_bytes = [], 0
    with con.sql(query).to_arrow_reader(_ROWS_AT_A_TIME) as reader:
        for batch in reader:
            batches.append(batch)
            num_bytes += batch.nbytes
            _check_size(num_bytes)
        return pa.Table.from_batches(batches, reader.schema)


def fetch_rows(con: duckdb.DuckDBPyConnection, query: str) -> list[dict[str, Any]]:
    """Return a dict for each row. For few rows this is faster than Arrow, which takes 0.1 s to
    load."""
    con.execute(query)
    names = [name for name, *_ in con.description or ()]
    found, num_values = [], 0
    while rows := con.fetchmany(_FEW_ROWS):
        found += [dict(zip(names, row, strict=True)) for row in rows]
        num_values += sum(len(value) for row in rows for value in row if isinstance(value, list))
        _check_size(_VALUE_BYTES * num_values)
    return found


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise ValueError(
            f"the answer is larger than {MAX_BYTES // 2**20} MiB: leave out the token columns, or "
            "add a LIMIT"
        )


@contextmanager
def _interrupted_after(timeout_s: float, con: duckdb.DuckDBPyConnection) -> Generator[None]:
    timer = threading.Timer(timeout_s, con.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def main() -> int:
    request = json.load(sys.stdin)
    timeout_s = float(request["timeout_s"])
    limit_process(timeout_s)
    try:
        table = answer(Path(request["path"]), request["query"], timeout_s)
    except MemoryError:
        print(_TOO_LARGE, file=sys.stderr)
        return REFUSED
    except (ValueError, OSError) as error:
        print(str(error)[:_MAX_ERROR], file=sys.stderr)
        return REFUSED
    import pyarrow as pa

    with pa.ipc.new_stream(sys.stdout.buffer, table.schema) as writer:
        writer.write_table(table)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the exit handlers: some libraries print to standard error there.
    os._exit(code)
