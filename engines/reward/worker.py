"""Process that runs a user's scorer. `engines.user_code.launch` starts it. It imports the standard
library and refrain's modules for workers only.

The user's Python file defines
`compute_score(data_source, solution_str, ground_truth, extra_info=None)`, plain or `async`.
`reward.kwargs` may add arguments. The function returns a number or a dict with `score`. With
`reward.group` it is `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`: four
lists with all responses to a prompt. It returns a list with a number or such a dict for each.

The process talks to refrain over one socket, with one JSON message per line. First it receives the
function to load (`Setup`) and replies READY or FAILED. Then it receives chunks of calls. For each
call it replies STARTED and then DONE or FAILED, in any order. Each reply repeats the chunk's random
name, which the user's code cannot guess. refrain enforces the time limits, kills a process that
hangs and checks all replies (`channel.py`).
"""

import asyncio
import inspect
import json
import os
import socket
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from ..user_code.importing import UserFault, die_first, explained, import_file, prepare_process
from ..user_code.values import from_json
from .results import as_dict, checked_score, checked_scores

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keyword arguments of the user's function, as in veRL."""
GROUP_ARGUMENTS = tuple(f"{name}s" for name in ARGUMENTS)
"""Keyword arguments of a function that scores groups, as for veRL's batch reward manager."""

Call = dict[str, Any]
"""Keyword arguments of one call of the scorer."""

Setup = dict[str, Any]
"""Arguments of `set_up`."""


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
    group: bool,
) -> Callable[..., Any]:
    """Set the import path and the memory limit of this process, and of those that it starts. Return
    the user's function.

    Raises UserFault as `load_function` does.
    """
    prepare_process(Path(path), search_path, max_memory_bytes, "reward.max_memory_bytes")
    return partial(load_function(Path(path), name, kwargs, group=group), **kwargs)


def _score_in_turn(
    parent: Parent, function: Callable[..., Any], calls: list[Call], runner: asyncio.Runner
) -> None:
    for index, call in enumerate(calls):
        with _replied(parent, index):
            # Call outside the event loop, because plain code may call `asyncio.run` itself.
            num = num_in_group(call)
            result = function(**call)
            if inspect.isawaitable(result):
                result = runner.run(_wait_for(result))
            _reply_with_score(parent, index, result, num)


async def _score_together(parent: Parent, function: Callable[..., Any], calls: list[Call]) -> None:
    async def score(index: int, call: Call) -> None:
        with _replied(parent, index):
            num = num_in_group(call)
            _reply_with_score(parent, index, await function(**call), num)

    await asyncio.gather(*(score(index, call) for index, call in enumerate(calls)))


def _reply_with_score(parent: Parent, index: int, result: Any, num: int | None) -> None:
    content: Any
    if num is None:
        content = as_dict(checked_score(result))
    else:
        content = [as_dict(scored) for scored in checked_scores(result, num)]
    parent.reply(Reply.DONE, index, content)


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


def load_function(
    path: Path, name: str, kwargs: Mapping[str, Any], *, group: bool = False
) -> Callable[..., Any]:
    """Import the file and return its function `name`. `group`: it scores groups.

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
    _check_arguments(function, path, name, GROUP_ARGUMENTS if group else ARGUMENTS, kwargs)
    return function


def num_in_group(call: Call) -> int | None:
    """Return how many responses a call scores as a group. None: it scores a single one."""
    texts = call.get("solution_strs")
    return None if texts is None else len(texts)


def _check_arguments(
    function: Callable[..., Any],
    path: Path,
    name: str,
    arguments: Sequence[str],
    kwargs: Mapping[str, Any],
) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(arguments), **kwargs)
    except TypeError as error:
        wanted = ", ".join((*arguments, *kwargs))
        raise UserFault(
            f"{name}{signature} in {path} cannot be called with {wanted}: {error}"
        ) from None
