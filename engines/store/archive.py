"""Old steps that the store has moved from the run's database to Parquet files beside it.

```
refrain.duckdb
refrain.archive/000001/     rollouts.parquet, rewards.parquet, plans.parquet, ..
refrain.archive/000002/     ..
refrain.archive/recent/     rollouts-00000101.parquet, rewards-00000101.parquet, ..
```

The store first writes and flushes the files of a folder. Then one transaction does the rest: it
lists the folder in the table `archives`, adds its rows to the sums and deletes them from the
database. So after a crash, each row is either still in the database, or in a listed folder only.
`with_archived` makes a query read both places.

`clear` looks for folders that no transaction listed. It deletes a folder whose rows the database
still has. It renames any other folder, because the folder belongs to a newer copy of the database.

`recent/` has copies for users of reported steps that are still in the database. refrain never reads
them. With them, `*/rollouts*` matches every reported step once.
"""

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb

from refrain.engines.durable import flush, set_aside
from refrain.engines.store import queries
from refrain.engines.store.ddl import ABSENT_ROLLOUTS
from refrain.engines.store.open_database import RUN, connect, explain_damage

if TYPE_CHECKING:  # `refrain samples` answers before it could load pyarrow.
    import pyarrow as pa

_KEY = ("split", "step", "prompt_key", "sample_index")
TABLES = ("rollouts", "rewards", "plans", "outcomes", "stages")
SUFFIX = ".archive"
KEPT_STEPS = 8
"""Number of last steps that stay in the database for reports, plans and training."""
CHUNK_STEPS = 50
"""Steps that are moved to one folder."""
CHUNK_TOKENS = 2**28
"""Tokens of responses after which fewer steps are moved to one folder."""
_DIGITS = 6
_ROWS_IN_A_GROUP = 2048
"""Rows of a Parquet row group, which DuckDB reads at once."""

Steps = tuple[int, int]
"""First and last step."""
ALL: Steps = (-(2**31), 2**31 - 1)


class Archive:
    """The archived steps of the database at `path`."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """`read_only`: the database may be an older one, which lacks columns."""
        self._read_only = read_only
        self._directory = path.absolute().with_suffix(SUFFIX)
        self._recent = self._directory / "recent"

    def refuse_orphaned(self, database: Path) -> None:
        """Raise ValueError when there are archived steps but no database. A new database would not
        know these steps."""
        if not database.exists() and (found := self._chunks_there()):
            raise RUN.damaged(
                database,
                f"is gone, and {self._directory.name} has {len(found)} folders with its old steps",
            )

    def clear(self, con: duckdb.DuckDBPyConnection, after: int | None = None) -> None:
        """Delete unlisted folders that a crash left, and outdated files in `recent/`.

        A file in `recent/` is outdated when its step is archived or later than `after`. Unlisted
        folders whose rows the database lacks are renamed.
        """
        for path in self.unlisted(con):
            if _is_held(con, path):
                shutil.rmtree(path)
            else:
                set_aside(path, "unlisted")
        ((last,),) = con.execute("SELECT coalesce(max(last_step), 0) FROM archives").fetchall()
        for path in self._recent.glob("*-*.parquet*"):
            step = int(path.name.partition("-")[2].partition(".")[0])
            if step <= last or (after is not None and step > after):
                path.unlink()

    def unlisted(self, con: duckdb.DuckDBPyConnection) -> list[Path]:
        """Return the folders that the database does not list."""
        listed = {name for (name,) in con.execute("SELECT name FROM archives").fetchall()}
        return [path for path in self._chunks_there() if path.name not in listed]

    def newer(self, con: duckdb.DuckDBPyConnection) -> list[Path]:
        """Return the folders of a newer copy of the database: this one does not list them, and it
        lacks their rows."""
        return [path for path in self.unlisted(con) if not _is_held(con, path)]

    def check(self, con: duckdb.DuckDBPyConnection) -> None:
        """Raise ValueError when a listed file is missing or truncated."""
        files = self._files(con)
        for file in files:
            if not file.is_file():
                raise ValueError(
                    f"{file} is missing. It has old steps of this run. When you copy or move "
                    f"the database, take the folder {self._directory.name} with it"
                )
        try:
            _read_footers(con, files)
        except duckdb.Error:
            for file in files:
                _check_footer(con, file)
            raise

    def due(self, con: duckdb.DuckDBPyConnection, last_step: int) -> bool:
        """Return whether there are enough steps up to this one to move them."""
        ((first, num_tokens),) = con.execute(queries.MOVABLE, [last_step]).fetchall()
        if first is None:
            return False
        return last_step - first + 1 >= CHUNK_STEPS or num_tokens >= CHUNK_TOKENS

    def write(self, con: duckdb.DuckDBPyConnection, last_step: int) -> tuple[Path, list[int]]:
        """Write the steps up to this one to a new folder that is not listed yet. Return the folder
        and each table's number of rows."""
        ((number,),) = con.execute(queries.NEXT_ARCHIVE).fetchall()
        chunk = self._directory / f"{number:0{_DIGITS}}"
        self.clear(con)
        chunk.mkdir(parents=True)
        num_rows = []
        for table in TABLES:
            file = chunk / f"{table}.parquet"
            _copy(con, table, f"step <= {last_step}", file)
            flush(file)
            num_rows += con.execute(f"SELECT count(*) FROM {_read([file])}").fetchone() or ()
        for directory in (chunk, self._directory, self._directory.parent):
            flush(directory)
        return chunk, num_rows

    def write_step(self, con: duckdb.DuckDBPyConnection, step: int) -> None:
        """Write a step's training rollouts and rewards to `recent/`."""
        self._recent.mkdir(parents=True, exist_ok=True)
        for table in ("rollouts", "rewards"):
            file = self._recent / f"{table}-{step:08}.parquet"
            temporary = file.with_suffix(".parquet.tmp")
            _copy(con, table, f"split = 'train' AND step = {step}", temporary)
            temporary.replace(file)

    def move(
        self, con: duckdb.DuckDBPyConnection, last_step: int, chunk: Path, num_rows: Sequence[int]
    ) -> bool:
        """List the folder and delete its rows from the database.

        Return False and change nothing when rows were added after the folder was written.
        """
        where = "WHERE step <= ?"
        for table, num in zip(TABLES, num_rows, strict=True):
            now = con.execute(f"SELECT count(*) FROM {table} {where}", [last_step]).fetchone()
            if now != (num,):
                return False
        con.execute(queries.LIST_ARCHIVE, {"name": chunk.name, "last_step": last_step})
        leaving = (f"{table} AS (FROM main.{table} WHERE step <= {last_step})" for table in TABLES)
        _sum_up(con, f"WITH {', '.join(leaving)}")
        for table in TABLES:
            con.execute(f"DELETE FROM {table} {where}", [last_step])
        return True

    def take_back(self, con: duckdb.DuckDBPyConnection, step: int, last_step: int) -> list[Path]:
        """Bring back the rows of folders that have steps after `step`, up to `last_step`. Return
        these folders. The caller deletes them after the commit."""
        chunks = _chunks(con, (step + 1, ALL[1]), self._directory)
        for chunk in chunks:
            for table in TABLES:
                rows = _read([chunk / f"{table}.parquet"])
                con.execute(f"INSERT INTO {table} BY NAME FROM {rows} WHERE step <= ?", [last_step])
            con.execute("DELETE FROM archives WHERE name = ?", [chunk.name])
        if chunks:
            con.execute("DELETE FROM archived_groups; DELETE FROM archived_drafts")
            if ctes := self._ctes(con, ALL, live=False):
                _sum_up(con, ctes)
        return chunks

    def with_archived(self, con: duckdb.DuckDBPyConnection, query: str, steps: Steps | None) -> str:
        """Return the query with CTEs that add archived rows of these steps to the tables, and the
        columns that older rows lack.

        With `steps` None, the query reads the database only. Run the returned query in the same
        transaction as this method.
        """
        ctes = self._ctes(con, steps, live=True) if steps else ""
        if not ctes:
            return query
        query = query.strip()
        return f"{ctes}, {query[4:]}" if query.startswith("WITH") else f"{ctes} {query}"

    def show_all(self, con: duckdb.DuckDBPyConnection) -> list[Path]:
        """Create views that add all archived steps to this connection's tables. Return the archived
        files."""
        ((catalog,),) = con.execute("SELECT current_database()").fetchall()
        chunks = _chunks(con, ALL, self._directory)
        for table in TABLES:
            files = [chunk / f"{table}.parquet" for chunk in chunks]
            archived = f" UNION ALL BY NAME FROM {_read(files)}" if files else ""
            con.execute(f'CREATE TEMP VIEW {table} AS FROM "{catalog}".main.{table}{archived}')
        return self._files(con)

    def insert_new(
        self, con: duckdb.DuckDBPyConnection, table: str, rows: "pa.Table", **values: str | int
    ) -> int:
        """Insert the rows whose primary key is new, in the archive too, and return how many.

        `values`: columns that have the same value in each row.
        """
        con.register("new_rows", rows)
        columns = ["*", *(f"${name} AS {name}" for name in values)]
        new = f"SELECT {', '.join(columns)} FROM new_rows"
        steps = con.execute(f"SELECT min(step), max(step) FROM ({new})", values).fetchone()
        assert steps
        if steps[0] is not None and (late := self._ctes(con, steps, live=False)):
            new = f"{late} FROM ({new}) ANTI JOIN {table} USING ({', '.join(_KEY)})"
        query = f"INSERT INTO {table} BY NAME {new} ON CONFLICT DO NOTHING"
        ((num_new,),) = con.execute(query, values).fetchall()
        return num_new

    def _chunks_there(self) -> list[Path]:
        return sorted(self._directory.glob("[0-9]" * _DIGITS))

    def _files(self, con: duckdb.DuckDBPyConnection) -> list[Path]:
        """Return the archived files that the database lists."""
        chunks = _chunks(con, ALL, self._directory)
        return [chunk / f"{table}.parquet" for chunk in chunks for table in TABLES]

    def _ctes(self, con: duckdb.DuckDBPyConnection, steps: Steps, *, live: bool) -> str:
        chunks = _chunks(con, steps, self._directory)
        if not chunks and not self._read_only:
            return ""
        ctes = [
            f"{table} AS NOT MATERIALIZED ({_united(table, chunks, live=live)})" for table in TABLES
        ]
        return f"WITH {', '.join(ctes)}"


def query_all(path: Path, query: str) -> "pa.Table":
    """Return the answer to a query over all steps of an ended run.

    Raise ValueError as `connect` does, and when archived files are missing.
    """
    with closing(connect(path, read_only=True, lock_timeout_s=0.0)) as con:
        archive = Archive(path, read_only=True)
        archive.check(con)
        with explain_damage(path):
            return con.sql(archive.with_archived(con, query, ALL)).to_arrow_table()


def is_recent(con: duckdb.DuckDBPyConnection, before_step: int | None) -> bool:
    """Return whether all archived steps are before this step."""
    ((last,),) = con.execute("SELECT max(last_step) FROM archives").fetchall()
    return before_step is None or last is None or before_step > last


def _is_held(con: duckdb.DuckDBPyConnection, chunk: Path) -> bool:
    """Return whether the database has all rollouts of the folder.

    Also return True when the folder's first file was not finished.
    """
    rollouts = chunk / f"{TABLES[0]}.parquet"
    try:
        rows = f"FROM {_read([rollouts])} ANTI JOIN main.rollouts USING ({', '.join(_KEY)})"
        ((num_missing,),) = con.execute(f"SELECT count(*) {rows}").fetchall()
    except duckdb.Error:
        # The file cannot be read. `write` writes it first, so a crash left no other file.
        return {path.name for path in chunk.iterdir()} <= {rollouts.name}
    return num_missing == 0


def _united(table: str, chunks: Sequence[Path], *, live: bool) -> str:
    """Return a query for the rows of these folders, with those of the database if `live`."""
    sources = [f"main.{table} {'' if live else 'WHERE false'}"]
    if chunks:
        sources.append(_read([chunk / f"{table}.parquet" for chunk in chunks]))
    if table == "rollouts":
        sources.append(f"({ABSENT_ROLLOUTS})")
    return " UNION ALL BY NAME ".join(f"FROM {source}" for source in sources)


def _read_footers(con: duckdb.DuckDBPyConnection, files: Sequence[Path]) -> None:
    if files:
        # A cursor has a transaction of its own, which an error may end.
        with closing(con.cursor()) as cursor:
            paths = ", ".join(map(_quoted, files))
            cursor.execute(f"FROM parquet_file_metadata([{paths}])").fetchall()


def _check_footer(con: duckdb.DuckDBPyConnection, file: Path) -> None:
    try:
        _read_footers(con, [file])
    except duckdb.Error as error:
        raise ValueError(
            f"{file} is damaged: {error}. It has old steps of this run. Bring it back from a copy"
        ) from error


def _copy(con: duckdb.DuckDBPyConnection, table: str, where: str, file: Path) -> None:
    # Experts are for the trainer alone, and larger than all else.
    columns = "* EXCLUDE (experts)" if table == "rollouts" else "*"
    con.execute(
        f"COPY (SELECT {columns} FROM {table} WHERE {where}) TO {_quoted(file)} "
        f"(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {_ROWS_IN_A_GROUP})"
    )


def _chunks(con: duckdb.DuckDBPyConnection, steps: Steps, directory: Path) -> list[Path]:
    """Return the folders that have some of these steps."""
    rows = con.execute(queries.ARCHIVES, steps).fetchall()
    return [directory / name for (name,) in rows]


def _read(files: Sequence[Path]) -> str:
    # Older files may lack columns.
    return f"read_parquet([{', '.join(map(_quoted, files))}], union_by_name = true)"


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def _sum_up(con: duckdb.DuckDBPyConnection, rows: str) -> None:
    """Add rows to the sums over archived rows. `rows`: CTEs that define the rows."""
    for table, query in queries.SUMS.items():
        con.execute(f"CREATE OR REPLACE TEMP TABLE sums AS {query.format(rows=rows)}")
        con.execute(f"DELETE FROM {table}")
        con.execute(f"INSERT INTO {table} BY NAME FROM sums")
    con.execute("DROP TABLE sums")
