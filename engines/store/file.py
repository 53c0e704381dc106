"""Access to a run's DuckDB file and to what has left it: transactions, snapshots, queries."""

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import duckdb
import pyarrow as pa

from engines.store.archive import ALL, Archive, Steps, is_recent
from engines.store.opening import connect, naming_damage
from schemas.rollout import Split


class StoreFile:
    """A run's database, owned by this process until `close`. Safe to share among threads."""

    def __init__(
        self, path: Path | str, *, read_only: bool = False, lock_timeout_s: float = 0.0
    ) -> None:
        """Raises ValueError when it is not a refrain store or a damaged one, when files of its old
        steps are missing, or are there and it is not, and when another process holds it for longer
        than `lock_timeout_s` seconds."""
        self.path = Path(path)
        Archive(self.path).refuse_orphaned(self.path)
        self._con = connect(self.path, read_only=read_only, lock_timeout_s=lock_timeout_s)
        self._writing, self._archiving = threading.Lock(), threading.Lock()
        self._archive = Archive(self.path)
        try:
            with self.snapshot() as con:
                self._archive.check(con)
        except ValueError:
            self._con.close()
            raise
        if not read_only:
            self._archive.clear(self._con)

    def close(self) -> None:
        self._con.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def verify(self) -> list[str]:
        """Read all that is in the database, which has checksums of its own; returns sentences about
        what is otherwise than it should be. Raises ValueError where it is damaged."""
        with self.snapshot() as con:
            for (table,) in con.execute("SELECT table_name FROM duckdb_tables()").fetchall():
                con.execute(f'SELECT bit_xor(hash(row)) FROM "{table}" AS row').fetchall()
            newer = self._archive.newer(con)
        return [
            f"{path} has steps that {self.path.name} does not know of, so this is an older copy of "
            "the database: bring back the newest one, or the folder is renamed"
            for path in newer
        ]

    def _replace(self, table: str, *row: Any) -> None:
        places = ", ".join("?" * len(row))
        with self._transaction() as con:
            con.execute(f"INSERT OR REPLACE INTO {table} VALUES ({places})", row)

    @contextmanager
    def _transaction(self) -> Generator[duckdb.DuckDBPyConnection]:
        """Durable on leaving, undone on an exception."""
        with self._writing, self._con.cursor() as con:
            con.begin()
            try:
                yield con
            except BaseException:
                con.rollback()
                raise
            con.commit()

    @contextmanager
    def snapshot(self) -> Generator[duckdb.DuckDBPyConnection]:
        """One state of the database for several queries."""
        with naming_damage(self.path), self._con.cursor() as con:
            con.begin()
            yield con
            con.rollback()

    def _fetch(self, query: str, steps: Steps | None = None, /, **parameters: Any) -> list[tuple]:
        """`steps`: what is read of steps that may have left the database."""
        with self.snapshot() as con:
            query = self._archive.with_archived(con, query, steps)
            return con.execute(query, parameters).fetchall()

    def _fetch_of(self, step: int, query: str, split: Split) -> list[tuple]:
        return self._fetch(query, (step, step), split=str(split), step=step)

    def _fetch_history(self, query: str, before_step: int | None, **parameters: Any) -> list[tuple]:
        """Answer that reads sums of what has left the database, and its rows only where it looks
        back from a step that has itself left."""
        parameters |= {"before_step": before_step}
        with self.snapshot() as con:
            recent = is_recent(con, before_step)
            query = self._archive.with_archived(con, query, None if recent else ALL)
            return con.execute(query, parameters | {"recent": recent}).fetchall()

    def _of_step(self, table: str, columns: Sequence[str], split: Split, step: int) -> pa.Table:
        """Rows by prompt key and sample index."""
        query = (
            f"SELECT {', '.join(columns)} FROM {table} "
            "WHERE split = $split AND step = $step ORDER BY prompt_key, sample_index"
        )
        return self._table_of(step, query, split)

    def _table_of(self, step: int, query: str, split: Split, **parameters: Any) -> pa.Table:
        return self._table(query, (step, step), split=str(split), step=step, **parameters)

    def _table(self, query: str, steps: Steps | None = None, /, **parameters: Any) -> pa.Table:
        """`steps`: what is read of steps that may have left the database."""
        with self.snapshot() as con:
            query = self._archive.with_archived(con, query, steps)
            return con.sql(query, params=parameters).to_arrow_table()
