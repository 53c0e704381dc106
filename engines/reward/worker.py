"""Script that runs a user's scorer in its own process. The script imports nothing of refrain,
because the user may have modules of the same names.

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
import hashlib
import importlib.util
import inspect
import json
import math
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
from typing import Any, SupportsFloat

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keyword arguments of the user's function, as in veRL."""

Call = dict[str, Any]
"""Keyword arguments of one call of the scorer."""

Setup = dict[str, Any]
"""Arguments of `set_up`."""

MAX_MESSAGE_CHARACTERS = MAX_TRACEBACK_CHARACTERS = 4000
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
    return partial(load_function(Path(path), name, kwargs), **kwargs)


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


class RefusedError(ValueError):
    """Fault of a user's scorer. `__cause__` is the exception of the user's code, if any."""


def load_function(path: Path, name: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Import the file and return its function `name`.

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
    _check_arguments(function, path, name, kwargs)
    return function


def checked_score(result: Any) -> tuple[float, dict[str, Any]]:
    """Return the score and the extra values, converted to what JSON can hold.

    The scorer's process calls this to explain the fault. refrain calls it again, because it does
    not trust that process. Extra numbers that are not finite or too large become None.

    Raises RefusedError unless the result is a finite number or a dict whose `score` is one. Also
    raises RefusedError for extra values that are too many, too large or not valid text.
    """
    extra: dict[str, Any] = {}
    score = result
    if isinstance(result, Mapping):
        if "score" not in result:
            raise RefusedError(f"the scorer returned a dict without 'score': {_shown(result)}")
        score = result["score"]
        extra = {str(name): value for name, value in result.items() if name != "score"}
    if not isinstance(score, SupportsFloat) or not abs(number := _as_float(score)) <= MAX_SCORE:
        bound = f"within {MAX_SCORE:g}"
        raise RefusedError(f"the scorer returned {_shown(score)}, not a finite number {bound}")
    return number, _checked_extra(extra)


def _as_float(number: SupportsFloat) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _checked_extra(extra: dict[str, Any]) -> dict[str, Any]:
    if len(extra) > MAX_PARTS or any(len(name) > MAX_NAME_CHARACTERS for name in extra):
        raise RefusedError(
            f"the scorer returned {len(extra)} values beside the score: return at most "
            f"{MAX_PARTS}, with names of at most {MAX_NAME_CHARACTERS} characters"
        )
    text = json.dumps(extra, default=str)
    if len(text) > MAX_EXTRA_BYTES:
        raise RefusedError(
            f"the values that the scorer returned beside the score take {len(text)} bytes as JSON: "
            f"shorten them to at most {MAX_EXTRA_BYTES} bytes"
        )
    return {
        _checked_value(name, name): _checked_value(value, name)
        for name, value in json.loads(text).items()
    }


def _checked_value(value: Any, name: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise RefusedError(f"{_shown(name)} is nested over {MAX_DEPTH} levels deep: flatten it")
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
        raise RefusedError(
            f"the scorer returned a text that is not valid UTF-8 in {_shown(name)}: return "
            "text.encode('utf-8', 'replace').decode()"
        ) from None


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
    function: Callable[..., Any], path: Path, name: str, kwargs: Mapping[str, Any]
) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **kwargs)
    except TypeError as error:
        wanted = ", ".join((*ARGUMENTS, *kwargs))
        raise RefusedError(
            f"{name}{signature} in {path} cannot be called with {wanted}: {error}"
        ) from None


def _shown(value: Any) -> str:
    return f"{str(value)[:80]!r} ({type(value).__name__})"


if __name__ == "__main__":
    serve(Parent(int(sys.argv[1])))
