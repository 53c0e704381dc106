"""Queries of other processes on this machine to the store of a run that goes on.

    refrain sql ── query, JSON ──► socket ── a thread, a cursor ──► table, Arrow

A socket, not an actor: who asks joins no cluster, and gets an answer while Ray is busy. It has a
name that is no file's and ends with its process; processes of this user alone are answered.
"""

import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa

ANSWER_S = 5.0
"""Longest time from the end of a query's own to its answer."""
_MAX_QUERY_BYTES = 2**20
_TABLE, _REFUSAL = b"T", b"R"

Ask = Callable[[str, float], pa.Table]
"""Answer to a query that takes at most so many seconds. Raises ValueError."""


def listen(run_dir: Path, ask: Ask) -> None:
    """Answer queries until this process ends. Raises OSError when another one does so already."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(_address(run_dir))
    listening.listen()
    threading.Thread(target=_accept, args=(listening, ask), daemon=True, name="sql").start()


def ask_live(run_dir: Path, query: str, timeout_s: float) -> pa.Table | None:
    """Answer of the run that has its store open on this machine; None when there is none. Raises
    ValueError when the query is refused."""
    asking = socket.socket(socket.AF_UNIX)
    try:
        asking.connect(_address(run_dir))
    except ConnectionRefusedError:
        asking.close()
        return None
    with closing(Connection(asking.detach())) as connection:
        try:
            connection.send_bytes(json.dumps({"query": query, "timeout_s": timeout_s}).encode())
            if not connection.poll(timeout_s + ANSWER_S):
                raise ValueError(f"the run's store has not answered for {timeout_s + ANSWER_S:g} s")
            kind, content = connection.recv_bytes(), connection.recv_bytes()
        except (OSError, EOFError) as error:
            raise ValueError(
                "the run's store has closed the connection: it has just ended, or is another user's"
            ) from error
    if kind == _REFUSAL:
        raise ValueError(content.decode())
    return pa.ipc.open_stream(content).read_all()


def _address(run_dir: Path) -> str:
    """Name in the kernel's own namespace: a path may be longer than a socket's name can be."""
    status = run_dir.stat()
    return f"\0refrain-sql-{status.st_dev}-{status.st_ino}"


def _accept(listening: socket.socket, ask: Ask) -> None:
    while True:
        # Who asks may be gone again.
        with suppress(OSError):
            asking, _ = listening.accept()
            if _user_of(asking) in (os.getuid(), 0):
                connection = Connection(asking.detach())
                threading.Thread(target=_reply, args=(connection, ask), daemon=True).start()
            else:
                asking.close()


def _user_of(asking: socket.socket) -> int:
    credentials = struct.Struct("3i")
    told = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    _, user, _ = credentials.unpack(told)
    return user


def _reply(connection: Connection, ask: Ask) -> None:
    with suppress(OSError, EOFError), closing(connection):
        try:
            asked = json.loads(connection.recv_bytes(_MAX_QUERY_BYTES))
            table = ask(asked["query"], asked["timeout_s"])
        except ValueError as error:
            connection.send_bytes(_REFUSAL)
            connection.send_bytes(str(error).encode())
            return
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        connection.send_bytes(_TABLE)
        connection.send_bytes(sink.getvalue())
