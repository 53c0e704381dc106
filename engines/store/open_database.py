"""Open a store's DuckDB file: lock it for one process and check its format."""

import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import duckdb

from refrain.engines.durable import is_disk_full
from refrain.engines.store.ddl import ADDED, CREATE, OPEN_TURNS, SCHEMA_VERSION

OPTIONS: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    # The engines need the memory and the cores. DuckDB would take 80 % of the memory by default.
    "memory_limit": "4GB",
    "threads": 2,
}


LOCKED = "Could not set lock"


class StoreLockedError(ValueError):
    """Another process holds the file."""


class OtherSchemaError(ValueError):
    """Another version of refrain wrote the file. It is whole."""


@dataclass(frozen=True)
class Format:
    """A kind of store: its name, its version and its tables."""

    name: str
    version: int
    create: str
    """SQL that creates the tables."""
    fix: str
    """Advice for the user of a damaged store; `{directory}` stands for its directory."""
    added: str = ""
    """SQL that adds columns and tables which older stores of this version lack."""

    def damaged(self, path: Path, why: str) -> ValueError:
        """Return the error for a damaged file, with advice."""
        return ValueError(f"{path} {why}. {self.fix.format(directory=path.parent)}")


_META = """
CREATE TABLE meta (name VARCHAR PRIMARY KEY, value VARCHAR NOT NULL);
INSERT INTO meta VALUES ('format', '{format.name}'), ('schema_version', '{format.version}');
"""

_MEND = (
    "Bring it back from a copy, with the folder refrain.archive of the same time. Without a copy, "
    "run `refrain train --resume {directory} --new-store`. It goes on from the last checkpoint, "
    "with an older copy or with an empty store. It renames damaged files and deletes nothing. Old "
    "rollouts stay in refrain.archive/*/rollouts.parquet, reports of steps in steps.jsonl"
)
RUN = Format("refrain store", SCHEMA_VERSION, CREATE + OPEN_TURNS, _MEND, ADDED + OPEN_TURNS)


def connect(
    path: Path, *, read_only: bool, lock_timeout_s: float, format: Format = RUN
) -> duckdb.DuckDBPyConnection:
    """Open the store at `path`; create a missing one unless `read_only`.

    Raise StoreLockedError when another process holds the file for more than `lock_timeout_s`
    seconds. Raise OtherSchemaError when it has another schema version, and ValueError when it is
    damaged or is not a refrain store.
    """
    if not str(path).isprintable():
        raise ValueError(
            f"{str(path)!r} cannot be opened: its name has characters that do not print. Rename it"
        )
    if read_only and not path.exists():
        raise ValueError(f"{path} does not exist: no run was recorded there")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file: a refrain store is a single DuckDB file")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a directory: create it before the store {path}")
    con = _open(path, read_only, time.monotonic() + lock_timeout_s, format)
    try:
        with explain_damage(path, format):
            _check_or_create(con, path, read_only, format)
    except BaseException:
        con.close()
        raise
    return con


@contextmanager
def explain_damage(path: Path, format: Format = RUN) -> Generator[None]:
    """Raise ValueError with advice when DuckDB finds the file damaged inside the block."""
    try:
        yield
    except duckdb.Error as error:
        if not _is_damage(error):
            raise
        raise format.damaged(path, f"cannot be read: {_first_line(error)}") from error


def _open(
    path: Path, read_only: bool, deadline_s: float, format: Format
) -> duckdb.DuckDBPyConnection:
    while True:
        try:
            return duckdb.connect(str(path), read_only=read_only, config=OPTIONS)
        except duckdb.Error as error:
            if LOCKED not in str(error):
                raise _explained(path, error, format) from error
            if time.monotonic() > deadline_s:
                raise _locked(path, str(error)) from error
        time.sleep(0.2)


def _locked(path: Path, message: str) -> StoreLockedError:
    holder = re.search(r"PID (\d+)", message)
    process = f"process {holder[1]}" if holder else "another process"
    return StoreLockedError(
        f"{path} is held by {process}: only one process at a time may open a run's store. "
        "Stop that process, or wait until its run ends"
    )


def _explained(path: Path, error: duckdb.Error, format: Format) -> ValueError:
    if "not a valid DuckDB database" in str(error):
        return format.damaged(path, f"is not a {format.name}: it is damaged, or not a DuckDB file")
    return format.damaged(path, f"cannot be opened: {_first_line(error)}")


def _is_damage(error: duckdb.Error) -> bool:
    """Return whether the error means a damaged file.

    DuckDB reports a wrong checksum as a plain `duckdb.Error`, without a subclass.
    """
    kinds = (duckdb.IOException, duckdb.SerializationException, duckdb.FatalException)
    return (type(error) is duckdb.Error or isinstance(error, kinds)) and not is_disk_full(error)


def _first_line(error: duckdb.Error) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _check_or_create(
    con: duckdb.DuckDBPyConnection, path: Path, read_only: bool, format: Format
) -> None:
    names = {name for (name,) in con.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    if not names and not read_only:
        con.execute(f"BEGIN; {_META.format(format=format)} {format.create} COMMIT")
        return
    if not names:
        raise format.damaged(path, f"has no tables: it was copied without {path.name}.wal")
    meta = dict(con.execute("SELECT name, value FROM meta").fetchall()) if "meta" in names else {}
    if meta.get("format") != format.name:
        raise ValueError(f"{path} is not a {format.name}: another program wrote this DuckDB file")
    if meta["schema_version"] != str(format.version):
        raise OtherSchemaError(
            f"{path} has schema version {meta['schema_version']}, but this refrain reads version "
            f"{format.version}. Open it with the release that wrote it, or start a new run"
        )
    if format.added and not read_only:
        con.execute(format.added)
