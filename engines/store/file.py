"""Transactions, snapshots and queries on a run's DuckDB file and its archive."""

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import duckdb
import pyarrow as pa

from refrain.engines.store.archive import ALL, Archive, Steps, is_recent
from refrain.engines.store.open_database import connect, explain_damage
from refrain.schemas.rollout import Split


class StoreFile:
    """A run's database. This process owns it until `close`; its threads may share it."""

    def __init__(
        self, path: Path | str, *, read_only: bool = False, lock_timeout_s: float = 0.0
    ) -> None:
        """Open the database at `path`; create a missing one unless `read_only`.

        Raise ValueError when
        - the file is damaged or is not a refrain store,
        - the archive lacks files that the database lists,
        - the archive has files but the database is missing,
        - another process holds the file for more than `lock_timeout_s` seconds.
        """
        self.path = Path(path)
        Archive(self.path).refuse_orphaned(self.path)
        self._con = connect(self.path, read_only=read_only, lock_timeout_s=lock_timeout_s)
        self._writing, self._archiving = threading.Lock(), threading.Lock()
        self._archive = Archive(self.path, read_only=read_only)
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
        """Read the whole database, so that DuckDB checks its checksums. Return a sentence for each
        archive folder that the database does not know. Raise ValueError when it is damaged."""
        with self.snapshot() as con:
            for (table,) in con.execute("SELECT table_name FROM duckdb_tables()").fetchall():
                con.execute(f'SELECT bit_xor(hash(row)) FROM "{table}" AS row').fetchall()
            newer = self._archive.newer(con)
        return [
            f"{path} has steps that {self.path.name} does not know, so this is an older copy of "
            "the database. Bring back the newest copy. Otherwise the next run renames the folder"
            for path in newer
        ]

    def _replace(self, table: str, *row: Any) -> None:
        places = ", ".join("?" * len(row))
        with self._transaction() as con:
            con.execute(f"INSERT OR REPLACE INTO {table} VALUES ({places})", row)

    @contextmanager
    def _transaction(self) -> Generator[duckdb.DuckDBPyConnection]:
        """Commit the block's changes to disk; roll them back when the block raises."""
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
        """Yield a connection whose queries all see the same state of the database."""
        with explain_damage(self.path), self._con.cursor() as con:
            con.begin()
            yield con
            con.rollback()

    def _fetch(self, query: str, steps: Steps | None = None, /, **parameters: Any) -> list[tuple]:
        """Return the rows of a query. `steps`: steps to read from the archive too."""
        with self.snapshot() as con:
            query = self._archive.with_archived(con, query, steps)
            return con.execute(query, parameters).fetchall()

    def _fetch_of(self, step: int, query: str, split: Split) -> list[tuple]:
        return self._fetch(query, (step, step), split=str(split), step=step)

    def _fetch_history(self, query: str, before_step: int | None, **parameters: Any) -> list[tuple]:
        """Return the rows of a query about the steps before `before_step`.

        For a recent `before_step`, the query reads the sums over archived rows. Only for a step
        that is itself archived, it reads the archived rows.
        """
        parameters |= {"before_step": before_step}
        with self.snapshot() as con:
            recent = is_recent(con, before_step)
            query = self._archive.with_archived(con, query, None if recent else ALL)
            return con.execute(query, parameters | {"recent": recent}).fetchall()

    def _of_step(self, table: str, columns: Sequence[str], split: Split, step: int) -> pa.Table:
        """Return a step's rows, ordered by prompt key and sample index."""
        query = (
            f"SELECT {', '.join(columns)} FROM {table} "
            "WHERE split = $split AND step = $step ORDER BY prompt_key, sample_index"
        )
        return self._table_of(step, query, split)

    def _table_of(self, step: int, query: str, split: Split, **parameters: Any) -> pa.Table:
        return self._table(query, (step, step), split=str(split), step=step, **parameters)

    def _table(self, query: str, steps: Steps | None = None, /, **parameters: Any) -> pa.Table:
        """Return the table of a query. `steps`: steps to read from the archive too."""
        with self.snapshot() as con:
            query = self._archive.with_archived(con, query, steps)
            return con.sql(query, params=parameters).to_arrow_table()
