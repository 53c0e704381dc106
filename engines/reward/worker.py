"""Process that runs a user's scorer. `worker_command` starts it.

It imports the standard library and its own package only. It imports that package under another
name, because the user may have modules called as refrain's.

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
import hashlib
import importlib.util
import inspect
import json
import os
import resource
import socket
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from .results import RefusedError, as_dict, checked_score, checked_scores

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keyword arguments of the user's function, as in veRL."""
GROUP_ARGUMENTS = tuple(f"{name}s" for name in ARGUMENTS)
"""Keyword arguments of a function that scores groups, as for veRL's batch reward manager."""

Call = dict[str, Any]
"""Keyword arguments of one call of the scorer."""

Setup = dict[str, Any]
"""Arguments of `set_up`."""

START = f"""
import sys, types
package = types.ModuleType("_refrain")
package.__path__ = [{str(Path(__file__).resolve().parent)!r}]
sys.modules["_refrain"] = package
from _refrain.worker import Parent, serve
serve(Parent(int(sys.argv[1])))
"""

MAX_MESSAGE_CHARACTERS = MAX_TRACEBACK_CHARACTERS = 4000


def worker_command(descriptor: int) -> list[str]:
    """Return the command of a process that talks over this descriptor."""
    return [sys.executable, "-P", "-c", START, str(descriptor)]


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


def serve(parent: Parent) -> None:
    """Load the function, then score chunks until refrain closes its end of the socket."""
    with suppress(OSError):
        # If memory runs out, Linux should kill a scorer rather than the run.
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        function = set_up(**parent.receive())
    except Exception as error:
        parent.reply(Reply.FAILED, content=_explain(error))
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

    Raises RefusedError as `load_function` does.
    """
    sys.path[:] = ordered_path(Path(path).absolute().parent, [*sys.path, *search_path])
    if max_memory_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = max_memory_bytes if hard == resource.RLIM_INFINITY else min(max_memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return partial(load_function(Path(path), name, kwargs, group=group), **kwargs)


def ordered_path(directory: Path, entries: Sequence[str]) -> list[str]:
    """Return the import path: standard library, directory of the user's file, other entries,
    refrain. So the user's files hide no standard module, and refrain's hide none of the user's."""
    standard_library = sysconfig.get_path("stdlib")
    refrain = str(Path(__file__).resolve().parents[2])
    ranks = {standard_library: 0, f"{standard_library}/lib-dynload": 0, str(directory): 1}
    distinct = dict.fromkeys(filter(None, [str(directory), *entries]))
    return sorted(distinct, key=lambda entry: ranks.get(entry, 3 if entry == refrain else 2))


def to_json(value: Any) -> Any:
    """Convert a value of a data set to JSON. Types of Parquet that JSON lacks become objects with a
    type name. `from_json` reverses this. Raises ValueError for other types."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list):
        return [to_json(one) for one in value]
    if isinstance(value, dict):
        plain = {name: to_json(one) for name, one in value.items()}
        return {TYPE: "dict", VALUE: list(plain.items())} if TYPE in plain else plain
    for name, (kind, encode, _) in TYPES.items():
        if isinstance(value, kind):
            return {TYPE: name, VALUE: encode(value)}
    if hasattr(value, "tolist"):
        return to_json(value.tolist())  # NumPy's.
    raise ValueError(f"scorers cannot receive a {type(value).__name__}: remove it from the rows")


def from_json(value: dict[str, Any]) -> Any:
    """Restore a value that `to_json` converted. Object hook of `json.loads`."""
    if TYPE not in value:
        return value
    _, _, decode = TYPES[value[TYPE]]
    return decode(value[VALUE])


TYPE, VALUE = "refrain.type", "refrain.value"
TYPES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (dict, dict.items, dict),
    "tuple": (tuple, lambda values: [to_json(one) for one in values], tuple),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "decimal": (Decimal, str, Decimal),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "timedelta": (
        timedelta,
        lambda span: [span.days, span.seconds, span.microseconds],
        lambda parts: timedelta(*parts),
    ),
}


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
        parent.reply(Reply.FAILED, index, _explain(error))


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result


def _explain(error: BaseException) -> str:
    """Return the error's message, with the traceback if the user's code raised it."""
    raised = error.__cause__ if isinstance(error, RefusedError) else error
    message = str(error) if isinstance(error, RefusedError) else _message_of(error)
    if raised is not None:
        lines = "".join(traceback.format_exception(raised))
        message = f"{message}\n{lines[-MAX_TRACEBACK_CHARACTERS:]}"
    return message.encode(errors="backslashreplace").decode()


def _message_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as second:
        text = f"its message cannot be read ({type(second).__name__})"
    return f"{type(error).__name__}: {text[:MAX_MESSAGE_CHARACTERS]}{_limit_of(error)}"


def _limit_of(error: BaseException) -> str:
    """Return the memory limit if it caused an error, or nothing."""
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if not isinstance(error, MemoryError) or most == resource.RLIM_INFINITY:
        return ""
    return f" (reward.max_memory_bytes is {most})"


def load_function(
    path: Path, name: str, kwargs: Mapping[str, Any], *, group: bool = False
) -> Callable[..., Any]:
    """Import the file and return its function `name`. `group`: it scores groups.

    Raises RefusedError when the file is missing or cannot be imported, and when the function is
    missing, is not callable or cannot take its arguments.
    """
    module = _import_file(path)
    if not hasattr(module, name):
        functions = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        found = f"it has {', '.join(functions)}" if functions else "it has no functions"
        raise RefusedError(f"{path} has no function {name!r} ({found}): set reward.function")
    function = getattr(module, name)
    if not callable(function):
        raise RefusedError(f"{name!r} in {path} is a {type(function).__name__}, not a function")
    _check_arguments(function, path, name, GROUP_ARGUMENTS if group else ARGUMENTS, kwargs)
    return function


def num_in_group(call: Call) -> int | None:
    """Return how many responses a call scores as a group. None: it scores a single one."""
    texts = call.get("solution_strs")
    return None if texts is None else len(texts)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RefusedError(f"reward.path {path} does not exist")
    # A unique module name: otherwise a file called `math.py` would hide a standard module.
    private = f"_refrain_reward_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(private, path)
    if spec is None or spec.loader is None:
        raise RefusedError(f"reward.path {path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module
    # Leave no `__pycache__` beside the user's file.
    sys.dont_write_bytecode = True
    try:
        spec.loader.exec_module(module)
    except SystemExit as end:
        raise RefusedError(f"{path} ends the process that imports it: {end}") from None
    except Exception as error:
        raise RefusedError(f"{path} cannot be imported: {_message_of(error)}") from error
    return module


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
        raise RefusedError(
            f"{name}{signature} in {path} cannot be called with {wanted}: {error}"
        ) from None
