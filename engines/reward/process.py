"""A user's scorer in a process of its own, so that one that hangs can be killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from engines.reward.worker import Call, Reply
from schemas.reward import FunctionReward

START_TIMEOUT_S = 300.0
"""Longest time to import the user's file, which may import large libraries."""

START = "from engines.reward.worker import run; run"

Scored = tuple[float, dict[str, Any]]


class CallError(Exception):
    """The call at `index` failed, ended the process or took too long."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)
        self.index = index
        self.reason = reason


class ScorerProcess:
    """Runs one user function. Started on first use, and again after an error ended it."""

    def __init__(self, config: FunctionReward) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Raises ValueError when the user's file cannot be used."""
        if self._process is not None:
            return
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{START}({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
        try:
            self._wait_until_ready(self._connection)
        except BaseException:
            self.close()
            raise

    def score(self, calls: Sequence[Call]) -> list[Scored]:
        """Raises CallError for the first that fails or takes over `timeout_s` seconds."""
        self.start()
        assert self._connection is not None
        try:
            self._connection.send(list(calls))
            return self._collect(self._connection, len(calls))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills the process with everything it started."""
        if self._process is None or self._connection is None:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        self._process = self._connection = None

    def _wait_until_ready(self, connection: Connection) -> None:
        path = self._config.path
        connection.send((path, self._config.function, self._config.kwargs))
        if not connection.poll(START_TIMEOUT_S):
            raise ValueError(f"{path} was not imported within {START_TIMEOUT_S:.0f} s")
        try:
            reply, _, reason = connection.recv()
        except EOFError as error:
            raise ValueError(f"{path} ends the process that imports it") from error
        if reply == Reply.FAILED:
            raise ValueError(reason)

    def _collect(self, connection: Connection, num_calls: int) -> list[Scored]:
        timeout_s = self._config.timeout_s
        started_s: dict[int, float] = {}
        done: dict[int, Scored] = {}
        while len(done) < num_calls:
            oldest = min(started_s, key=started_s.__getitem__, default=None)
            # Nothing has started: the process is only busy receiving, which is bounded too.
            since_s = time.monotonic() if oldest is None else started_s[oldest]
            if not connection.poll(max(0.0, since_s + timeout_s - time.monotonic())):
                index = oldest if oldest is not None else min(set(range(num_calls)) - set(done))
                raise CallError(index, f"no score within {timeout_s:g} s (reward.timeout_s)")
            reply, index, content = self._receive(connection, oldest or 0)
            if reply == Reply.FAILED:
                raise CallError(index, content)
            if reply == Reply.STARTED:
                started_s[index] = time.monotonic()
            else:
                del started_s[index]
                done[index] = content
        return [done[index] for index in range(num_calls)]

    def _receive(self, connection: Connection, running: int) -> tuple[Reply, int, Any]:
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError) as error:
            assert self._process is not None
            code = self._process.wait(timeout=START_TIMEOUT_S)
            raise CallError(running, f"the scorer ended its process (exit code {code})") from error
