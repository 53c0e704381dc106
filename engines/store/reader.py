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
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from refrain.engines.store.archive import Archive
from refrain.engines.store.listener import Condition, Needed, Snapshot, live_snapshot, quoted
from refrain.engines.store.open_database import OPTIONS, connect
from refrain.engines.store.sandbox import REFUSED, limit_process

MAX_BYTES = 256 * 2**20
"""Size of the largest answer. The calling process holds the answer in memory."""
_MAX_ERROR = 10_000
"""Characters of the longest error message. DuckDB may repeat data in it."""
_ROWS_AT_A_TIME = 1024
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


def answer(path: Path, query: str, timeout_s: float) -> pa.Table:
    """Return the answer to one query on the store at `path`.

    Raise ValueError when the query writes, when DuckDB refuses it, when its answer has more than
    `MAX_BYTES`, or when it takes longer than `timeout_s` seconds.
    """
    try:
        selects = _checked(query)
        try:
            return _collect(_prepare(path, selects, timeout_s), query, timeout_s)
        except duckdb.InvalidInputException as error:
            if _NOT_FETCHED not in str(error):
                raise
        # DuckDB may read a column that its plan does not list, as in EXISTS (FROM rollouts).
        return _collect(_prepare(path, selects, timeout_s, all_columns=True), query, timeout_s)
    except duckdb.OutOfMemoryException as error:
        raise ValueError(_TOO_LARGE) from error
    except duckdb.InterruptException as error:
        raise ValueError(f"no answer within {timeout_s:g} s: ask for less") from error
    except duckdb.Error as error:
        raise ValueError(str(error)) from error


def _checked(query: str) -> str:
    """Return the query's statement without EXPLAIN.

    Raise ValueError unless the query is a single SELECT or a statement like it.
    """
    statements = duckdb.extract_statements(query)
    if len(statements) != 1:
        raise ValueError(_READS_ONLY)
    (statement,) = statements
    if statement.type == duckdb.StatementType.EXPLAIN:
        return _checked(_EXPLAIN.sub("", statement.query, count=1))
    if statement.type != duckdb.StatementType.SELECT:
        raise ValueError(_READS_ONLY)
    return statement.query


def _prepare(
    path: Path, selects: str, timeout_s: float, *, all_columns: bool = False
) -> duckdb.DuckDBPyConnection:
    """Return a connection that has the data of the query and reaches nothing else.

    A live run's store sends the data first, so the query itself does not block the store.
    """
    with live_snapshot(path.parent, timeout_s) as live:
        con = _open(path, live)
        _lock(con, Archive(path).show_all(con))
        plan = _plan(con, selects)
        if live:
            needed = _needed(plan, live)
            if all_columns:
                needed = {table: Needed(tuple(live.columns[table])) for table in needed}
            _load(con, live, needed, live.columns)
    return con


def _open(path: Path, live: Snapshot | None) -> duckdb.DuckDBPyConnection:
    """Open the database of an ended run, or an empty one with the tables of a live run."""
    if not live:
        con = connect(path, read_only=True, lock_timeout_s=0.0)
        Archive(path).check(con)
        return con
    con = duckdb.connect(config=OPTIONS)
    con.execute("CREATE SCHEMA live")
    for table, columns in live.columns.items():
        typed = ", ".join(f"{quoted(name)} {kind}" for name, kind in columns.items())
        con.execute(f"CREATE TABLE live.{quoted(table)} ({typed})")
        con.execute(f"CREATE VIEW {quoted(table)} AS FROM live.{quoted(table)}")
    _load(con, live, {"archives": Needed(tuple(live.columns["archives"]))}, ["archives"])
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


def _collect(con: duckdb.DuckDBPyConnection, query: str, timeout_s: float) -> pa.Table:
    batches, num_bytes = [], 0
    with closing(con), _interrupted_after(timeout_s, con):
        # DuckDB refuses any statement that would write.
        con.execute("BEGIN TRANSACTION READ ONLY")
        reader = con.sql(query).to_arrow_reader(_ROWS_AT_A_TIME)
        for batch in reader:
            batches.append(batch)
            num_bytes += batch.nbytes
            if num_bytes > MAX_BYTES:
                raise ValueError(
                    f"the answer is larger than {MAX_BYTES // 2**20} MiB: leave out the token "
                    "columns, or add a LIMIT"
                )
        return pa.Table.from_batches(batches, reader.schema)


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
    with pa.ipc.new_stream(sys.stdout.buffer, table.schema) as writer:
        writer.write_table(table)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the exit handlers: some libraries print to standard error there.
    os._exit(code)
