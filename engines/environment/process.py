"""One worker process of a user's environments, under the guard.

Many calls run at the same time. A call that fails leaves the process alive. The process ends when a
call hangs, when its code exits or writes to refrain's socket, or when someone kills it or its
guard. Then each running call raises ProcessEnded, which names the cause and whom to blame:

    a call hung, and the worker names it          OWN for that call, OTHER for the rest
    anything else, with one running call          OWN
    anything else, with several                   UNKNOWN
"""

import asyncio
import json
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from refrain.engines.environment import worker
from refrain.engines.user_code.launch import (
    end_guarded,
    how_it_ended,
    start_guarded,
    variables_for,
    worker_command,
)
from refrain.schemas.environment import EnvironmentConfig

START_TIMEOUT_S = 300.0
"""Time limit for importing the user's file, which may import large libraries."""
GRACE_S = 1.0
"""Time after `timeout_s` in which the worker must report that a call hangs."""
MAX_LINE_BYTES = 2**21
"""Size limit of a reply. The worker refuses answers of half the size."""


class Blame(StrEnum):
    """Whose fault the end of a process is, seen from one running call."""

    OWN = "own"
    OTHER = "other"
    UNKNOWN = "unknown"


class CallFailed(Exception):
    """The user's code raised, was cancelled in time or returned a bad value."""


class ProcessEnded(Exception):
    """The process ended before it answered a call."""

    def __init__(self, reason: str, blame: Blame) -> None:
        super().__init__(reason)
        self.blame = blame


class EnvironmentSetup(BaseModel):
    """What a user's file defines."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tools: list[dict[str, JsonValue]]
    """JSON schemas of the tools, as chat templates take them."""
    has_class: bool
    """False: tools alone, which keep nothing from turn to turn."""
    has_end: bool
    """Whether the class scores a conversation that was cut."""
    replays: bool
    """Whether the same turns rebuild the state of a conversation."""

    @property
    def goes_on(self) -> bool:
        """Whether a conversation can go on in another process. Tools alone keep no state."""
        return self.replays or not self.has_class


class WorkerReply(BaseModel):
    """A line that the worker wrote."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str
    reply: str
    conversation: str
    turn: int
    content: JsonValue


@dataclass(frozen=True, slots=True)
class _RunningCall:
    place: tuple[str, int]
    """Conversation and turn."""
    result: asyncio.Future[JsonValue]


class EnvironmentProcess:
    """A process that answers calls. It starts once. After its end, create another."""

    def __init__(
        self,
        config: EnvironmentConfig,
        surroundings: Mapping[str, str] | None = None,
        at_once: int | None = None,
    ) -> None:
        """`surroundings`: the run's locale variables, used instead of this machine's. `at_once`:
        most calls at the same time, by default the setting's."""
        self._config = config
        self._surroundings = surroundings
        self._at_once = at_once or config.at_once
        self._places = asyncio.Semaphore(self._at_once)
        self._running: dict[str, _RunningCall] = {}
        self._group: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._closing: asyncio.Task[None] | None = None
        self.ended: str | None = None
        """Why the process ended. None while it is alive."""
        self.num_waiting = 0
        """Calls that run or wait for a place."""

    async def start(self) -> EnvironmentSetup:
        """Start the process. Raises ValueError that names the user's file and the reason."""
        own, theirs = socket.socketpair()
        with theirs:
            self._process = self._spawned(theirs.fileno())
        connection = asyncio.open_connection(sock=own, limit=MAX_LINE_BYTES)
        self._reader, self._writer = await connection
        try:
            if self.ended is not None:
                raise ValueError(f"{self._config.path} was not imported: {self.ended}")
            setup = await self._load()
        except BaseException:
            await self.close()
            raise
        self._reading = asyncio.create_task(self._read())
        return setup

    async def call(
        self, method: str, conversation: str, turn: int = 0, **content: JsonValue
    ) -> JsonValue:
        """Return what the worker returned for a call.

        `method`: `reset`, `step`, `end` or `close`. Raises CallFailed or ProcessEnded at most
        `timeout_s` + `GRACE_S` seconds after the call got its place.
        """
        self.num_waiting += 1
        try:
            async with self._places:
                return await self._call(method, (conversation, turn), content)
        finally:
            self.num_waiting -= 1

    def end(self, reason: str, guilty: str | None = None) -> None:
        """Kill the process. Its running calls raise ProcessEnded. `guilty`: the id of the call that
        hung."""
        if self.ended is not None:
            return
        self.ended = reason
        alone = len(self._running) == 1
        for name, call in self._running.items():
            blame = Blame.OTHER if guilty else Blame.UNKNOWN
            if alone or name == guilty:
                blame = Blame.OWN
            if not call.result.done():
                call.result.set_exception(ProcessEnded(reason, blame))
                # The caller may have been cancelled.
                call.result.exception()
        self._running.clear()
        self._closing = asyncio.create_task(self._kill())

    async def close(self) -> None:
        """Kill the process with everything that it started, and wait for its end."""
        self.end("refrain closed it")
        assert self._closing is not None
        await asyncio.shield(self._closing)

    def _spawned(self, descriptor: int) -> subprocess.Popen[bytes]:
        python = str(self._config.python or sys.executable)
        command = worker_command(python, "environment", descriptor)
        return start_guarded(command, descriptor, self._variables())

    def _variables(self) -> dict[str, str]:
        named = self._config.variables
        variables = variables_for(named, self._surroundings, "environment.variables")
        if self._config.python is None:
            return variables
        # Another interpreter has its own packages.
        ours = [n for n in variables if n.startswith("PYTHON") or n == "VIRTUAL_ENV"]
        return {n: text for n, text in variables.items() if n not in ours or n in named}

    async def _load(self) -> EnvironmentSetup:
        path = self._config.path
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                # This line is from the guard, because no code of the user runs yet.
                self._group = int(await self._line())
                self._send(self._setup())
                line = WorkerReply.model_validate_json(await self._line())
            if line.reply != worker.READY:
                raise ValueError(str(line.content))
            return EnvironmentSetup.model_validate(line.content)
        except TimeoutError as error:
            raise ValueError(f"{path} was not imported within {START_TIMEOUT_S:.0f} s") from error
        except ValidationError as error:
            raise ValueError(f"{path} writes to refrain's socket") from error
        except (EOFError, OSError) as error:
            ended = await asyncio.to_thread(self._how_it_ended)
            raise ValueError(f"{path} ends the process that imports it: {ended}") from error

    def _setup(self) -> dict[str, Any]:
        config = self._config
        return {
            "path": str(config.path),
            "name": config.name,
            "kwargs": config.arguments,
            "search_path": [] if config.python else [str(entry) for entry in sys.path],
            "max_memory_bytes": config.max_memory_bytes,
            "timeout_s": config.timeout_s,
            "at_once": self._at_once,
        }

    async def _call(self, method: str, place: tuple[str, int], content: JsonValue) -> JsonValue:
        if self.ended is not None:
            raise ProcessEnded(self.ended, Blame.OTHER)
        name = secrets.token_hex(16)
        result: asyncio.Future[JsonValue] = asyncio.get_running_loop().create_future()
        self._running[name] = _RunningCall(place, result)
        conversation, turn = place
        request = {
            "id": name,
            "method": method,
            "conversation": conversation,
            "turn": turn,
            "content": content,
        }
        self._send(request)
        timeout_s = self._config.timeout_s
        done, _ = await asyncio.wait({result}, timeout=timeout_s + GRACE_S)
        if not done:
            self.end(f"its process stood still for {timeout_s:g} s (environment.timeout_s)")
        return result.result()

    def _send(self, message: JsonValue) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        """Take replies until the process ends or writes something else."""
        try:
            while True:
                self._take(WorkerReply.model_validate_json(await self._line()))
        except (EOFError, OSError):
            self.end(await asyncio.to_thread(self._how_it_ended))
        except (ValueError, RecursionError) as error:
            cause = "no valid reply" if isinstance(error, ValidationError) else str(error)
            self.end(f"its process wrote to refrain's socket: {cause}")

    async def _line(self) -> bytes:
        """Return the next line. Raises EOFError, OSError, or ValueError if it is too long."""
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return line

    def _take(self, line: WorkerReply) -> None:
        call = self._running.get(line.id)
        if call is None or call.place != (line.conversation, line.turn):
            raise ValueError("it replied to a call that was not running")
        if line.reply == worker.HUNG:
            self.end(str(line.content), guilty=line.id)
            return
        del self._running[line.id]
        if call.result.done():
            return
        if line.reply == worker.DONE:
            call.result.set_result(line.content)
        else:
            call.result.set_exception(CallFailed(str(line.content)))

    async def _kill(self) -> None:
        # The guard notices the closed socket and kills the worker with all that it started.
        if self._writer is not None:
            # Do not wait until the worker has read what was sent.
            self._writer.transport.abort()
        if self._process is not None:
            await asyncio.to_thread(end_guarded, self._process, self._group)

    def _how_it_ended(self) -> str:
        assert self._process is not None
        return how_it_ended(self._process, "its code")
