"""A scorer in a process of its own, so that one that hangs can be killed, and all that it started
with it."""

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from engines.reward import guard, worker
from engines.reward.worker import LIMITS, Call, Reply, Setup
from schemas.reward import FunctionReward

START_TIMEOUT_S = 300.0
"""Longest time to import the user's file, which may import large libraries."""
END_TIMEOUT_S = 2 * guard.CLEAR_S
"""Longest time for the process to end with all that it started."""

COMMAND = (sys.executable, "-I", "-S", guard.__file__)
WORKER = (sys.executable, "-P", worker.__file__)

PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR",
    "PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "XDG_*", "*_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "DO_NOT_TRACK", "REFRAIN_RUN_DIR",
)  # fmt: skip
"""Environment variables that every scorer gets, as patterns: none that holds a secret."""

SIGNALS = {int(one): one.name for one in signal.Signals}

Scored = tuple[float, dict[str, Any]]


class Failed(NamedTuple):
    """A call without a score."""

    reason: str


class CallError(Exception):
    """The call at `index` failed, ended the process or took too long."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)
        self.index = index
        self.reason = reason


class ScorerProcess:
    """Runs one function. Started on first use, and again after an error ended it."""

    def __init__(self, config: FunctionReward) -> None:
        self._config = config
        self.num_scored = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._group: int | None = None

    def start(self) -> None:
        """Raises ValueError when the user's file cannot be used."""
        if self._process is not None and self._process.poll() is None:
            return
        # One that was killed while it had nothing to do took no score with it.
        self.close()
        environment = passed_on(os.environ, self._config.environment)
        self._connection, theirs = Pipe()
        _limit_waits(self._connection, self._config.timeout_s)
        with theirs:
            descriptor = str(theirs.fileno())
            self._process = subprocess.Popen(
                [*COMMAND, descriptor, *WORKER, descriptor],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        try:
            self._group = self._wait_until_ready(self._connection)
        except BaseException:
            self.close()
            raise

    def score(self, calls: Sequence[Call]) -> list[Scored | Failed | None]:
        """Outcome of each call: one fails that raises, gives no finite number, ends the process
        or takes over `timeout_s` seconds. None: another one ended the process before.

        Raises CallError for the first that fails where `on_error` is `stop`.
        """
        self.start()
        assert self._connection is not None
        try:
            return self._outcomes(self._connection, calls)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills the process with everything it started."""
        if self._process is None or self._connection is None:
            return
        # The guard sees it, and kills them.
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        if self._process.poll() is None:
            self._process.kill()
        if self._process.wait() < 0 and self._group is not None:
            # It is the guard that was killed: the command is dead, what it started may not be.
            with suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
        self._process = self._connection = self._group = None

    def _wait_until_ready(self, connection: Connection) -> int:
        """The scorer's process group."""
        path = self._config.path
        try:
            connection.send(self._setup())
            if not connection.poll(START_TIMEOUT_S):
                raise ValueError(f"{path} was not imported within {START_TIMEOUT_S:.0f} s")
            reply, _, content = connection.recv()
        except (EOFError, OSError) as error:
            raise ValueError(f"{path} ends the process that imports it") from error
        if reply == Reply.FAILED:
            raise ValueError(content)
        return content

    def _setup(self) -> Setup:
        config = self._config
        return {
            "path": Path(config.path),
            "name": config.function,
            "kwargs": config.arguments,
            "search_path": sys.path,
            "limits": {name: value for name in LIMITS if (value := getattr(config, name))},
        }

    def _outcomes(
        self, connection: Connection, calls: Sequence[Call]
    ) -> list[Scored | Failed | None]:
        outcomes: dict[int, Scored | Failed] = {}
        try:
            self._send(connection, calls)
            self._collect(connection, len(calls), outcomes)
        except CallError as error:
            if self._stops:
                raise
            self.close()
            outcomes[error.index] = Failed(error.reason)
        return [outcomes.get(index) for index in range(len(calls))]

    @property
    def _stops(self) -> bool:
        return self._config.on_error == "stop"

    def _send(self, connection: Connection, calls: Sequence[Call]) -> None:
        try:
            connection.send(list(calls))
        except OSError as error:
            raise CallError(0, self._how_it_ended(error)) from error

    def _collect(
        self, connection: Connection, num_calls: int, outcomes: dict[int, Scored | Failed]
    ) -> None:
        """Raises CallError for the one that ends the process or has to be ended with it; for one
        that fails otherwise where that stops the run."""
        timeout_s = self._config.timeout_s
        started_s: dict[int, float] = {}
        while len(outcomes) < num_calls:
            oldest = min(started_s, key=started_s.__getitem__, default=None)
            # Nothing has started: the process is only busy receiving, which is bounded too.
            since_s = time.monotonic() if oldest is None else started_s[oldest]
            if not connection.poll(max(0.0, since_s + timeout_s - time.monotonic())):
                index = oldest if oldest is not None else _first_without(outcomes, num_calls)
                raise CallError(index, f"no score within {timeout_s:g} s (reward.timeout_s)")
            running = _first_without(outcomes, num_calls) if oldest is None else oldest
            reply, index, content = self._receive(connection, running)
            if reply == Reply.STARTED:
                started_s[index] = time.monotonic()
                continue
            started_s.pop(index, None)
            if reply == Reply.FAILED:
                if self._stops:
                    raise CallError(index, content)
                content = Failed(content)
            outcomes[index] = content
            self.num_scored += 1

    def _receive(self, connection: Connection, running: int) -> tuple[Reply, int, Any]:
        try:
            return connection.recv()
        except (EOFError, OSError) as error:
            raise CallError(running, self._how_it_ended(error)) from error

    def _how_it_ended(self, error: OSError | EOFError) -> str:
        assert self._process is not None
        if isinstance(error, BlockingIOError):
            return f"its process stood still for {self._config.timeout_s:g} s (reward.timeout_s)"
        code = self._process.wait(END_TIMEOUT_S)
        name = SIGNALS.get(code - guard.SIGNALLED if code > guard.SIGNALLED else -code)
        if name is None:
            return f"the scorer ended its process (exit code {code})"
        memory = ", as Linux does when memory is short" * (name == signal.SIGKILL.name)
        return f"its process was ended by {name}{memory}"


def _first_without(outcomes: Mapping[int, Any], num_calls: int) -> int:
    return next(index for index in range(num_calls) if index not in outcomes)


def passed_on(environment: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """The variables that a scorer gets: those of `PASSED_ON`, and those that `reward.environment`
    names.

    Raises ValueError when one of the latter is not set.
    """
    for name in named:
        if name not in environment:
            raise ValueError(
                f"reward.environment names {name}, which is not set where the scorer runs: export "
                "it (on a cluster, where Ray is started), or leave it out"
            )
    return {
        name: value
        for name, value in environment.items()
        if name in named or any(fnmatchcase(name, pattern) for pattern in PASSED_ON)
    }


def _limit_waits(connection: Connection, timeout_s: float) -> None:
    """No message that is begun waits longer for the other side."""
    microseconds = max(1, int(timeout_s * 1e6))
    limit = struct.pack("ll", *divmod(microseconds, 1_000_000))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, limit)
