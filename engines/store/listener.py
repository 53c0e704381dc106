"""Serve the tables of a live run's store to queries in other processes of this machine.

    engines.store.reader ── timeout ──────────► socket ── a thread takes a snapshot
                         ◄─ columns by table ──
                         ── needed columns ───►
                         ◄─ rows (Arrow) ──────          repeated for each request

The store's process runs no SQL of a user. It copies columns in batches, and the reader's process
runs the query. A socket serves the reader better than a Ray actor: the reader joins no cluster, and
gets an answer while Ray is busy.

The socket has an abstract name: no file, and the kernel removes it when the process ends. Any user
of the machine can take such a name. So each side checks the other's user and skips names that other
users have taken.
"""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from io import BufferedReader, BufferedRWPair
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb

from refrain.engines.store.sandbox import MAX_TIMEOUT_S

if TYPE_CHECKING:  # `refrain samples` answers before it could load pyarrow.
    import pyarrow as pa

NUM_NAMES = 8
"""Socket names that a store tries."""
SERVING = "sql reader"
"""Name of the threads that serve readers."""
_MAX_READERS = 4
"""Most snapshots at a time. DuckDB keeps deleted rows on disk while a snapshot can see them."""
_FIRST_LINE_S = 30.0
"""Longest wait for a reader's first message."""
_MAX_LINE_BYTES = 2**20
_ROWS_AT_A_TIME = 1024
_OPERATORS = ("=", "<", "<=", ">", ">=")

Condition = tuple[str, str, int | str]
"""Column, operator and value."""
TakeSnapshot = Callable[[], AbstractContextManager[duckdb.DuckDBPyConnection]]


@dataclass(frozen=True)
class Needed:
    """Columns and rows of one table that a query reads."""

    columns: tuple[str, ...]
    where: tuple[tuple[Condition, ...], ...] = ()
    """Alternatives: a row is sent when it meets all conditions of one of them. Empty: all rows."""


class Snapshot:
    """Tables of a live store at one moment."""

    def __init__(self, asking: socket.socket, stream: BufferedReader) -> None:
        self._asking, self._stream = asking, stream
        self.columns: dict[str, dict[str, str]] = _receive(stream)
        """SQL type of each column, by table."""

    def read(self, needed: Mapping[str, Needed]) -> "Iterator[pa.RecordBatchReader]":
        """Yield a reader of each table's rows. Read each to its end before you take the next."""
        import pyarrow as pa

        self._asking.sendall(_line({table: asdict(one) for table, one in needed.items()}))
        for _ in needed:
            yield pa.ipc.open_stream(self._stream)


def listen(run_dir: Path, take_snapshot: TakeSnapshot) -> None:
    """Serve the store's tables until this process ends. Raise OSError when all names are taken."""
    listening = socket.socket(socket.AF_UNIX)
    for address in _addresses(run_dir):
        try:
            listening.bind(address)
            break
        except OSError as error:
            taken = error
    else:
        listening.close()
        raise OSError(f"{taken}: {NUM_NAMES} names are taken, see {_shown(address)} in `ss -xlp`")
    listening.listen()
    threading.Thread(
        target=_accept, args=(listening, take_snapshot), daemon=True, name="sql"
    ).start()


@contextmanager
def live_snapshot(run_dir: Path, timeout_s: float) -> Generator[Snapshot | None]:
    """Yield the tables of the run that has its store open on this machine, or None without one.

    Raise ValueError when the store does not answer within `timeout_s` seconds.
    """
    if (asking := _connect(run_dir, timeout_s)) is None:
        yield None
        return
    with closing(asking), asking.makefile("rb") as stream:
        try:
            asking.sendall(_line(timeout_s))
            snapshot = Snapshot(asking, stream)
        except TimeoutError as error:
            raise ValueError(f"the run's store has not answered for {timeout_s:g} s") from error
        except (OSError, ValueError) as error:
            raise ValueError(
                "the run's store has closed the connection. Its run has just ended, or it belongs "
                "to another user"
            ) from error
        yield snapshot


def _addresses(run_dir: Path) -> list[str]:
    """Return abstract socket names. A path could be too long for a socket's name."""
    status = run_dir.stat()
    first = f"\0refrain-sql-{status.st_dev}-{status.st_ino}"
    return [first, *(f"{first}-{number}" for number in range(1, NUM_NAMES))]


def _shown(address: str) -> str:
    return address.replace("\0", "@")


def _connect(run_dir: Path, timeout_s: float) -> socket.socket | None:
    trusted = (run_dir.stat().st_uid, 0)
    for address in _addresses(run_dir):
        asking = socket.socket(socket.AF_UNIX)
        asking.settimeout(timeout_s)
        # Nobody listens here, or another user's process refuses the connection.
        with suppress(OSError):
            asking.connect(address)
            if _user_of(asking) in trusted:
                return asking
        asking.close()
    return None


def _accept(listening: socket.socket, take_snapshot: TakeSnapshot) -> None:
    slots = threading.BoundedSemaphore(_MAX_READERS)
    while True:
        # The reader may have ended, or the machine may be out of threads.
        with suppress(OSError, RuntimeError):
            asking, _ = listening.accept()
            if _user_of(asking) in (os.getuid(), 0):
                threading.Thread(
                    target=_serve, args=(asking, take_snapshot, slots), daemon=True, name=SERVING
                ).start()
            else:
                asking.close()


def _user_of(other: socket.socket) -> int:
    """Return the user id of the process at the other end. For a listening process, this is its user
    when it began to listen."""
    credentials = struct.Struct("3i")
    told = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    _, user, _ = credentials.unpack(told)
    return user


def _serve(
    asking: socket.socket, take_snapshot: TakeSnapshot, slots: threading.BoundedSemaphore
) -> None:
    try:
        with closing(asking), asking.makefile("rwb") as stream:
            asking.settimeout(_FIRST_LINE_S)
            timeout_s = min(float(_receive(stream)), MAX_TIMEOUT_S)
            deadline_s = time.monotonic() + timeout_s
            # The reader gives up a second earlier and reports that the store did not answer.
            if slots.acquire(timeout=timeout_s + 1.0):
                try:
                    _give(asking, stream, take_snapshot, deadline_s)
                finally:
                    slots.release()
    except OSError:
        return  # The reader has ended or timed out.
    except (ValueError, TypeError, duckdb.Error) as error:
        print(f"bad request of `refrain sql`, perhaps from another version of refrain: {error}")


def _give(
    asking: socket.socket, stream: BufferedRWPair, take_snapshot: TakeSnapshot, deadline_s: float
) -> None:
    import pyarrow as pa

    with take_snapshot() as con:
        _bound(asking, deadline_s)
        stream.write(_line(_columns(con)))
        stream.flush()
        while line := stream.readline(_MAX_LINE_BYTES):
            for table, needed in json.loads(line).items():
                reader = _select(con, table, Needed(**needed))
                with pa.ipc.new_stream(stream, reader.schema) as writer:
                    for batch in reader:
                        _bound(asking, deadline_s)
                        writer.write_batch(batch)
            stream.flush()


def _bound(asking: socket.socket, deadline_s: float) -> None:
    asking.settimeout(max(0.001, deadline_s - time.monotonic()))


def _columns(con: duckdb.DuckDBPyConnection) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    rows = con.execute(
        "SELECT table_name, column_name, data_type FROM duckdb_columns() "
        "WHERE database_name = current_database() AND schema_name = 'main' AND NOT internal "
        "ORDER BY table_name, column_index"
    )
    for table, column, data_type in rows.fetchall():
        found.setdefault(table, {})[column] = data_type
    return found


def _select(con: duckdb.DuckDBPyConnection, table: str, needed: Needed) -> "pa.RecordBatchReader":
    query = f"SELECT {', '.join(map(quoted, needed.columns))} FROM main.{quoted(table)}"
    values: list[int | str] = []
    if needed.where:
        either = []
        for conditions in needed.where:
            for _, operator, value in conditions:
                if operator not in _OPERATORS:
                    raise ValueError(f"unknown operator: {operator}")
                values.append(value)
            either.append(
                " AND ".join(f"{quoted(c)} {operator} ?" for c, operator, _ in conditions)
            )
        query += f" WHERE ({') OR ('.join(either)})"
    return con.sql(query, params=values).to_arrow_reader(_ROWS_AT_A_TIME)


def quoted(name: str) -> str:
    """Return the name of a column or table, quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _receive(stream: BufferedRWPair | BufferedReader):
    return json.loads(stream.readline(_MAX_LINE_BYTES))
