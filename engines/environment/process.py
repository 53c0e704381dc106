"""A worker process of environments, under a guard that kills it with all that it starts.

refrain checks each reply: a process may write anything, and may answer only the calls that run.
"""

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from engines.bounded import wait_for
from engines.environment import worker
from engines.reward import guard
from engines.reward.process import COMMAND, SIGNALS, locale_of, passed_on
from schemas.environment import EnvironmentConfig, EnvironmentSetup

START_TIMEOUT_S = 300.0
"""Time limit for importing the user's file, which may import large libraries."""
END_TIMEOUT_S = 2 * guard.CLEAR_S
MAX_LINE_BYTES = 2**25
"""Size limit of a reply."""


class ProcessLost(Exception):
    """The process ended or was killed. `own`: whether a call that ran may have been the cause."""

    def __init__(self, why: str, *, own: bool) -> None:
        super().__init__(why)
        self.own = own


class CallFailed(Exception):
    """A call raised, took too long or returned something else than an answer."""


class EnvironmentProcess:
    """One process. `start` starts it, and `close` ends it."""

    def __init__(
        self, config: EnvironmentConfig, surroundings: Mapping[str, str] | None = None
    ) -> None:
        """`surroundings`: the run's locale variables, used instead of this machine's."""
        self._config = config
        self._surroundings = surroundings
        self._room = asyncio.Semaphore(config.at_once)
        self._process: subprocess.Popen[Any] | None = None
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._group: int | None = None
        self.num_conversations = 0

    @property
    def alive(self) -> bool:
        return self._reading is not None and not self._reading.done()

    async def start(self) -> EnvironmentSetup:
        """Start the process. Raise ValueError when the user's file cannot be used."""
        own, theirs = socket.socketpair()
        with theirs:
            descriptor = str(theirs.fileno())
            command = (sys.executable, "-P", worker.__file__, descriptor)
            self._process = await asyncio.to_thread(
                subprocess.Popen,
                [*COMMAND, descriptor, *command],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=self._environment(),
                start_new_session=True,
            )
        self._reader, self._writer = await asyncio.open_connection(sock=own, limit=MAX_LINE_BYTES)
        try:
            setup = await wait_for(self._load(), START_TIMEOUT_S)
        except TimeoutError as error:
            await self.close()
            slow = f"{self._config.path} was not imported within {START_TIMEOUT_S:.0f} s"
            raise ValueError(slow) from error
        except BaseException:
            await self.close()
            raise
        self._reading = asyncio.create_task(self._read())
        return setup

    def _environment(self) -> dict[str, str]:
        environment = passed_on(os.environ, self._config.environment)
        if self._surroundings is None:
            return environment
        own = locale_of(environment).keys() - set(self._config.environment)
        kept = {name: value for name, value in environment.items() if name not in own}
        return {**self._surroundings, **kept}

    async def _load(self) -> EnvironmentSetup:
        path = self._config.path
        # This line is from the guard, because no code of the user runs yet.
        self._group = int(await self._reader.readline())
        given = {
            "path": str(path),
            "name": self._config.name,
            "search_path": [str(entry) for entry in sys.path],
            "max_memory_bytes": self._config.max_memory_bytes,
            "at_once": self._config.at_once,
        }
        self._writer.write(json.dumps(given).encode() + b"\n")
        try:
            reply = _reply(await self._reader.readline())
        except ProcessLost as error:
            raise ValueError(f"{path} ends the process that imports it: {error}") from error
        if reply["reply"] != worker.READY:
            raise ValueError(str(reply["content"]))
        setup = reply["content"]
        return EnvironmentSetup(tuple(setup["tools"]), setup["has_class"], setup["replays"])

    async def call(self, method: str, conversation: str, **content: Any) -> Any:
        """Return what a method of the user's code returned.

        Raise CallFailed if it raised or took over `timeout_s`; the process is killed then. Raise
        ProcessLost if the process has ended.
        """
        async with self._room:
            if not self.alive:
                raise ProcessLost("its process had ended", own=False)
            request = secrets.token_hex(8)
            answer = self._calls[request] = asyncio.get_running_loop().create_future()
            message = {
                "request": request,
                "method": method,
                "conversation": conversation,
                "content": content,
            }
            try:
                self._writer.write(json.dumps(message, default=str).encode() + b"\n")
                return await wait_for(answer, self._config.timeout_s)
            except TimeoutError as error:
                self._calls.pop(request, None)
                await self.close("another conversation's call took too long")
                limit = f"{self._config.timeout_s:g} s (environment.timeout_s)"
                raise CallFailed(f"no answer to {method} within {limit}") from error
            finally:
                self._calls.pop(request, None)

    async def _read(self) -> None:
        try:
            while True:
                reply = _reply(await self._reader.readline())
                answer = self._calls.get(reply["request"])
                if answer is None or answer.done():
                    raise ProcessLost("it replied to a call that was not running", own=True)
                if reply["reply"] == worker.DONE:
                    answer.set_result(reply["content"])
                else:
                    answer.set_exception(CallFailed(str(reply["content"])))
        except (ProcessLost, OSError, ValueError) as error:
            self._fail(ProcessLost(await self._how_it_ended(str(error)), own=True))

    def _fail(self, error: ProcessLost) -> None:
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)

    async def _how_it_ended(self, why: str) -> str:
        assert self._process is not None
        try:
            code = await asyncio.to_thread(self._process.wait, 1.0)
        except subprocess.TimeoutExpired:
            return f"its process wrote to refrain's socket: {why}"
        name = SIGNALS.get(code - guard.SIGNALLED if code > guard.SIGNALLED else -code)
        if name is None:
            return f"the environment ended its process (exit code {code})"
        memory = ", as Linux does when memory is short" * (name == signal.SIGKILL.name)
        return f"its process was ended by {name}{memory}"

    async def close(self, why: str = "it was closed") -> None:
        """Kill the process with everything it started. Calls that run raise ProcessLost."""
        if self._reading is not None:
            self._reading.cancel()
        self._fail(ProcessLost(why, own=False))
        process, self._process = self._process, None
        if process is None:
            return
        # The guard notices the closed socket and kills them.
        self._writer.close()
        await asyncio.to_thread(_end, process, self._group)


def _end(process: subprocess.Popen[Any], group: int | None) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    if process.poll() is None:
        process.kill()
    if process.wait() < 0 and group is not None:
        # The guard itself was killed. The worker died with it, but its children may live.
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _reply(line: bytes) -> dict[str, Any]:
    """Return a reply. Raise ProcessLost if the line is none."""
    if not line:
        raise ProcessLost("it closed refrain's socket", own=True)
    try:
        reply = json.loads(line)
    except ValueError as error:
        raise ProcessLost(f"{line[:80]!r}", own=True) from error
    if not isinstance(reply, dict) or not {"request", "reply", "content"} <= reply.keys():
        raise ProcessLost(f"{line[:80]!r}", own=True)
    return reply
