"""Process that runs a user's scorer. `engines.user_code.launch` starts it. It imports the standard
library and refrain's modules for workers only.

The user's Python file defines
`compute_score(data_source, solution_str, ground_truth, extra_info=None)`, plain or `async`.
`reward.kwargs` may add arguments. The function returns a number or a dict with `score`.

The process talks to refrain over one socket, with one JSON message per line. First it receives the
function to load (`Setup`) and replies READY or FAILED. Then it receives chunks of calls. For each
call it replies STARTED and then DONE or FAILED, in any order. Each reply repeats the chunk's random
name, which the user's code cannot guess. refrain enforces the time limits, kills a process that
hangs and checks all replies (`channel.py`).
"""

import asyncio
import inspect
import json
import math
import os
import socket
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat

from ..user_code.importing import (
    UserFault,
    die_first,
    explained,
    import_file,
    prepare_process,
    shown,
)
from ..user_code.values import from_json

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keyword arguments of the user's function, as in veRL."""

Call = dict[str, Any]
"""Keyword arguments of one call of the scorer."""

Setup = dict[str, Any]
"""Arguments of `set_up`."""

MAX_SCORE = 1e9
"""Largest absolute score: its square must fit the trainer's float32."""
MAX_PART = 1e100
"""Largest absolute number in an extra value, so that sums over a step stay finite."""
MAX_PARTS = 100
"""Most extra values of one response."""
MAX_NAME_CHARACTERS = 200
MAX_EXTRA_BYTES = 2**16
"""Largest size of all extra values of a response, as JSON."""
MAX_DEPTH = 20
"""Deepest nesting of an extra value."""


class Reply(StrEnum):
    READY = "ready"
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


class Parent:
    """Socket to refrain. Only the process that opened the socket may use it.

    A user's function may fork, and both processes may return from it. The child's socket is closed,
    and the child exits when it tries to reply.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._pid = os.getpid()
        self._received = bytearray()
        self.chunk = ""
        """Name of the current chunk."""
        os.register_at_fork(after_in_child=self._socket.close)

    def receive(self) -> dict[str, Any]:
        """Return the next message. Raises EOFError when refrain has closed its end."""
        while b"\n" not in self._received:
            received = self._socket.recv(2**20)
            if not received:
                raise EOFError
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line, object_hook=from_json)

    def reply(self, reply: Reply, index: int = -1, content: Any = None) -> None:
        if os.getpid() != self._pid:
            os._exit(0)
        message = {"chunk": self.chunk, "reply": reply, "index": index, "content": content}
        self._socket.sendall(json.dumps(message).encode() + b"\n")


def main(descriptor: int) -> None:
    """Serve refrain at this descriptor."""
    die_first()
    serve(Parent(descriptor))


def serve(parent: Parent) -> None:
    """Load the function, then score chunks until refrain closes its end of the socket."""
    try:
        function = set_up(**parent.receive())
    except Exception as error:
        parent.reply(Reply.FAILED, content=explained(error))
        return
    parent.reply(Reply.READY)
    with asyncio.Runner() as runner, suppress(EOFError):
        while True:
            message = parent.receive()
            parent.chunk = message["chunk"]
            if inspect.iscoroutinefunction(function):
                runner.run(_score_together(parent, function, message["calls"]))
            else:
                _score_in_turn(parent, function, message["calls"], runner)


def set_up(
    path: str,
    name: str,
    kwargs: Mapping[str, Any],
    search_path: Sequence[str],
    max_memory_bytes: int | None,
) -> Callable[..., Any]:
    """Set the import path and the memory limit of this process, and of those that it starts. Return
    the user's function.

    Raises UserFault as `load_function` does.
    """
    prepare_process(Path(path), search_path, max_memory_bytes)
    return partial(load_function(Path(path), name, kwargs), **kwargs)


def _score_in_turn(
    parent: Parent, function: Callable[..., Any], calls: list[Call], runner: asyncio.Runner
) -> None:
    for index, call in enumerate(calls):
        with _replied(parent, index):
            # Call outside the event loop, because plain code may call `asyncio.run` itself.
            result = function(**call)
            if inspect.isawaitable(result):
                result = runner.run(_wait_for(result))
            _reply_with_score(parent, index, result)


async def _score_together(parent: Parent, function: Callable[..., Any], calls: list[Call]) -> None:
    async def score(index: int, call: Call) -> None:
        with _replied(parent, index):
            _reply_with_score(parent, index, await function(**call))

    await asyncio.gather(*(score(index, call) for index, call in enumerate(calls)))


def _reply_with_score(parent: Parent, index: int, result: Any) -> None:
    score, extra = checked_score(result)
    parent.reply(Reply.DONE, index, {"score": score} | extra)


@contextmanager
def _replied(parent: Parent, index: int) -> Generator[None]:
    """Reply STARTED, and FAILED if the call raises."""
    parent.reply(Reply.STARTED, index)
    try:
        yield
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        parent.reply(Reply.FAILED, index, explained(error))


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result


def load_function(path: Path, name: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Import the file and return its function `name`.

    Raises UserFault when the file is missing or cannot be imported, and when the function is
    missing, is not callable or cannot take its arguments.
    """
    module = import_file(path, "reward.path")
    if not hasattr(module, name):
        functions = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        found = f"it has {', '.join(functions)}" if functions else "it has no functions"
        raise UserFault(f"{path} has no function {name!r} ({found}): set reward.function")
    function = getattr(module, name)
    if not callable(function):
        raise UserFault(f"{name!r} in {path} is a {type(function).__name__}, not a function")
    _check_arguments(function, path, name, kwargs)
    return function


def checked_score(result: Any) -> tuple[float, dict[str, Any]]:
    """Return the score and the extra values, converted to what JSON can hold.

    The scorer's process calls this to explain the fault. refrain calls it again, because it does
    not trust that process. Extra numbers that are not finite or too large become None.

    Raises UserFault unless the result is a finite number or a dict whose `score` is one. Also
    raises UserFault for extra values that are too many, too large or not valid text.
    """
    extra: dict[str, Any] = {}
    score = result
    if isinstance(result, Mapping):
        if "score" not in result:
            raise UserFault(f"the scorer returned a dict without 'score': {shown(result)}")
        score = result["score"]
        extra = {str(name): value for name, value in result.items() if name != "score"}
    if not isinstance(score, SupportsFloat) or not abs(number := _as_float(score)) <= MAX_SCORE:
        bound = f"within {MAX_SCORE:g}"
        raise UserFault(f"the scorer returned {shown(score)}, not a finite number {bound}")
    return number, _checked_extra(extra)


def _as_float(number: SupportsFloat) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _checked_extra(extra: dict[str, Any]) -> dict[str, Any]:
    if len(extra) > MAX_PARTS or any(len(name) > MAX_NAME_CHARACTERS for name in extra):
        raise UserFault(
            f"the scorer returned {len(extra)} values beside the score: return at most "
            f"{MAX_PARTS}, with names of at most {MAX_NAME_CHARACTERS} characters"
        )
    text = json.dumps(extra, default=str)
    if len(text) > MAX_EXTRA_BYTES:
        raise UserFault(
            f"the values that the scorer returned beside the score take {len(text)} bytes as JSON: "
            f"shorten them to at most {MAX_EXTRA_BYTES} bytes"
        )
    return {
        _checked_value(name, name): _checked_value(value, name)
        for name, value in json.loads(text).items()
    }


def _checked_value(value: Any, name: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise UserFault(f"{shown(name)} is nested over {MAX_DEPTH} levels deep: flatten it")
    if isinstance(value, list):
        return [_checked_value(one, name, depth + 1) for one in value]
    if isinstance(value, dict):
        return {
            _checked_value(key, name): _checked_value(one, name, depth + 1)
            for key, one in value.items()
        }
    if isinstance(value, int | float):
        return value if abs(value) <= MAX_PART else None
    try:
        return value.encode().decode() if isinstance(value, str) else value
    except UnicodeEncodeError:
        raise UserFault(
            f"the scorer returned a text that is not valid UTF-8 in {shown(name)}: return "
            "text.encode('utf-8', 'replace').decode()"
        ) from None


def _check_arguments(
    function: Callable[..., Any], path: Path, name: str, kwargs: Mapping[str, Any]
) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **kwargs)
    except TypeError as error:
        wanted = ", ".join((*ARGUMENTS, *kwargs))
        raise UserFault(
            f"{name}{signature} in {path} cannot be called with {wanted}: {error}"
        ) from None
