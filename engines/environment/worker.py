"""Process that runs a user's environments. `engines.user_code.launch` starts it.

It talks to refrain over one socket, one JSON message a line. It first receives the file to load and
replies READY or FAILED. Then it receives calls, in any order, and runs many at the same time:

    {"id": random, "method": "step", "conversation": key, "turn": 3, "content": {...}}
    {"id": random, "reply": "done", "conversation": key, "turn": 3, "content": {...}}

Plain code runs in threads, async code on the loop. A call without an answer in `timeout_s` gets the
reply FAILED if it could be cancelled, and HUNG if refrain must kill the process. refrain checks all
replies and knows a call by its random id, which the user's code cannot guess.

This process imports the standard library of Python 3.9 and refrain's modules for workers only.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ..user_code.importing import UserFault, die_first, explained, prepare_process
from ..user_code.values import from_json
from .agents import AgentConversation
from .answers import ending_score
from .conversations import LiveConversation, UserCode, end_child, load_user_code, run_plainly
from .endpoint import Endpoint

READY, DONE, FAILED, HUNG = "ready", "done", "failed", "hung"
"""Kinds of reply."""
CALL: ContextVar[str] = ContextVar("CALL")
"""Id of the call that a task works on."""
MAX_REQUEST_BYTES = 2**30
CANCEL_S = 0.2
"""Time in which a cancelled call must end."""
MAX_AGENTS_IN_THREADS = 1024
"""Most agents of a process that run in `asyncio.to_thread`. Each keeps its thread between turns."""


def main(descriptor: int) -> None:
    """Load the user's file, then answer calls until refrain closes its end of the socket."""
    die_first()
    end = socket.socket(fileno=descriptor)
    end.set_inheritable(False)
    os.register_at_fork(after_in_child=end.close)
    setup = json.loads(_first_line(end))
    try:
        code = set_up(setup)
    except Exception as error:
        end.sendall(line_of(FAILED, content=explained(error)))
        return
    end_child()
    end.sendall(line_of(READY, content=code.setup))
    asyncio.run(Worker(code, setup["timeout_s"], setup["at_once"]).serve(end))
    # A thread may hang. Do not wait for it.
    os._exit(0)


def set_up(setup: dict[str, Any]) -> UserCode:
    """Set import path and memory limit of this process. Return the user's code."""
    path = Path(setup["path"])
    memory = setup["max_memory_bytes"]
    prepare_process(path, setup["search_path"], memory, "environment.max_memory_bytes")
    return load_user_code(path, setup["name"], setup["kwargs"])


def line_of(
    reply: str, name: str = "", conversation: str = "", turn: int = 0, content: Any = None
) -> bytes:
    """Return a reply as a line."""
    message = {
        "id": name,
        "reply": reply,
        "conversation": conversation,
        "turn": turn,
        "content": content,
    }
    return json.dumps(message, ensure_ascii=False).encode() + b"\n"


class Worker:
    """Live conversations and running calls."""

    def __init__(self, code: UserCode, timeout_s: float, at_once: int) -> None:
        self._code = code
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(at_once)
        self._in_threads: set[tuple[str, object]] = set()
        """Calls that run in a thread now."""
        self._conversations: dict[str, LiveConversation | AgentConversation] = {}
        self._endpoint = Endpoint()
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self, end: socket.socket) -> None:
        """Answer calls until refrain closes its end."""
        reader, writer = await asyncio.open_connection(sock=end, limit=MAX_REQUEST_BYTES)
        if self._code.is_agent:
            threads = ThreadPoolExecutor(MAX_AGENTS_IN_THREADS)
            asyncio.get_running_loop().set_default_executor(threads)
            await self._endpoint.start()
        while line := await reader.readline():
            task = asyncio.ensure_future(self._reply_to(json.loads(line), writer))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _reply_to(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        name, place = request["id"], (request["conversation"], request["turn"])
        CALL.set(name)
        task = asyncio.ensure_future(self._result_of(request))
        done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        reply, content = self._outcome(task) if done else await self._cancelled(name, task)
        end_child()
        writer.write(line_of(reply, name, *place, content))

    async def _result_of(self, request: dict[str, Any]) -> Any:
        method, key, content = request["method"], request["conversation"], request["content"]
        if method == "reset":
            self._conversations[key] = self._new()
            task = json.loads(content["task"], object_hook=from_json)
            return await self._conversations[key].reset(task)
        if method == "close":
            return await self._conversations.pop(key).close()
        if method == "end":
            return ending_score(await self._conversations[key].end(content["reason"]))
        # Tools alone keep nothing from turn to turn.
        conversation = self._conversations.get(key) or self._new()
        return await conversation.step(**content)

    def _new(self) -> LiveConversation | AgentConversation:
        if self._code.is_agent:
            return AgentConversation(self._code, self._in_thread, self._endpoint)
        return LiveConversation(self._code, self._in_thread)

    async def _in_thread(self, function: Any, /, *arguments: Any, **named: Any) -> Any:
        job = (CALL.get(), object())

        def run() -> Any:
            try:
                return run_plainly(function, *arguments, **named)
            finally:
                self._in_threads.discard(job)

        self._in_threads.add(job)
        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def _outcome(self, task: asyncio.Task[Any]) -> tuple[str, Any]:
        if task.cancelled():
            return FAILED, "its code cancelled itself"
        error = task.exception()
        return (DONE, task.result()) if error is None else (FAILED, explained(error))

    async def _cancelled(self, name: str, task: asyncio.Task[Any]) -> tuple[str, Any]:
        reason = f"no answer within {self._timeout_s:g} s (environment.timeout_s)"
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=CANCEL_S)
        stuck = not done or any(job[0] == name for job in self._in_threads)
        return (HUNG if stuck else FAILED), reason


def _first_line(end: socket.socket) -> bytes:
    """Return the first line, byte by byte, so that no later one is read."""
    received = bytearray()
    while not received.endswith(b"\n"):
        one = end.recv(1)
        if not one:
            raise UserFault("refrain closed the socket before it sent the file to load")
        received += one
    return bytes(received)
