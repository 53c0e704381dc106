"""The process in which a user's scorer runs, loaded from a Python file as it is. A script: it
imports nothing of refrain, as the user may have modules of the same names.

The file defines `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, plain or
`async`, with more arguments if `reward.kwargs` gives them; it returns a number or a dict with
`score`.

The process talks over one pipe. First it receives the function to load (`Setup`) and answers READY
or FAILED; then it receives lists of calls and answers for each, in any order, STARTED and then DONE
or FAILED. The other side keeps the clock and kills what hangs.
"""

import asyncio
import errno
import hashlib
import importlib.util
import inspect
import json
import math
import os
import resource
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsFloat

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Given by keyword, as veRL does."""

Call = dict[str, Any]
"""Keyword arguments of one call of the scorer."""

Setup = dict[str, Any]
"""Arguments of `set_up`."""

MAX_TRACEBACK_CHARACTERS = 4000

LIMITS = {
    "max_memory_bytes": resource.RLIMIT_DATA,
    "max_processes": resource.RLIMIT_NPROC,
    "max_file_bytes": resource.RLIMIT_FSIZE,
}
"""Limits of `reward`, which hold for each process that the function starts too."""
LIMIT_OF_ERRNO = {errno.EAGAIN: "max_processes", errno.EFBIG: "max_file_bytes"}


class Reply(StrEnum):
    READY = "ready"
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


def serve(connection: Connection) -> None:
    """The process's life at its end of the pipe."""
    try:
        function = set_up(**connection.recv())
    except Exception as error:
        _tell(connection, Reply.FAILED, -1, _explain(error))
        return
    _tell(connection, Reply.READY, -1, os.getpid())
    with asyncio.Runner() as runner, suppress(EOFError):
        while True:
            calls = connection.recv()
            if inspect.iscoroutinefunction(function):
                runner.run(_score_together(connection, function, calls))
            else:
                _score_in_turn(connection, function, calls, runner)


def set_up(
    path: Path,
    name: str,
    kwargs: Mapping[str, Any],
    search_path: Sequence[str],
    limits: Mapping[str, int],
) -> Callable[..., Any]:
    """The user's function, its process limited and finding the user's modules.

    Raises RefusedError as `load_function` does.
    """
    sys.path[:] = ordered_path(path.absolute().parent, [*sys.path, *search_path])
    for limit, value in limits.items():
        _, hard = resource.getrlimit(LIMITS[limit])
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(LIMITS[limit], (value, value))
    return partial(load_function(path, name, kwargs), **kwargs)


def ordered_path(directory: Path, entries: Sequence[str]) -> list[str]:
    """The standard library, the directory of the user's file, the other entries, refrain last: no
    file of the user's hides a standard module, none of refrain's hides the user's."""
    standard_library = sysconfig.get_path("stdlib")
    refrain = str(Path(__file__).resolve().parents[2])
    ranks = {standard_library: 0, f"{standard_library}/lib-dynload": 0, str(directory): 1}
    distinct = dict.fromkeys(filter(None, [str(directory), *entries]))
    return sorted(distinct, key=lambda entry: ranks.get(entry, 3 if entry == refrain else 2))


def _tell(connection: Connection, reply: Reply, index: int, content: Any) -> None:
    # As plain text: this module has another name on the other side.
    connection.send((str(reply), index, content))


def _score_in_turn(
    connection: Connection, function: Callable[..., Any], calls: list[Call], runner: asyncio.Runner
) -> None:
    for index, call in enumerate(calls):
        with _told(connection, index):
            # Not inside the loop: plain code may call `asyncio.run` itself.
            result = function(**call)
            if inspect.isawaitable(result):
                result = runner.run(_wait_for(result))
            _tell(connection, Reply.DONE, index, checked_score(result))


async def _score_together(
    connection: Connection, function: Callable[..., Any], calls: list[Call]
) -> None:
    async def score(index: int, call: Call) -> None:
        with _told(connection, index):
            _tell(connection, Reply.DONE, index, checked_score(await function(**call)))

    await asyncio.gather(*(score(index, call) for index, call in enumerate(calls)))


@contextmanager
def _told(connection: Connection, index: int) -> Generator[None]:
    """Tell that a call begins and, if so, that it fails."""
    _tell(connection, Reply.STARTED, index, None)
    try:
        yield
    except Exception as error:
        _tell(connection, Reply.FAILED, index, _explain(error))


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result


def _explain(error: Exception) -> str:
    """The message; with the traceback where the user's code, not refrain, raised."""
    message, raised = str(error), error.__cause__
    if not isinstance(error, RefusedError):
        message, raised = f"{type(error).__name__}: {error}{_limit_of(error)}", error
    if raised is None:
        return message
    lines = "".join(traceback.format_exception(raised))
    return f"{message}\n{lines[-MAX_TRACEBACK_CHARACTERS:]}"


def _limit_of(error: Exception) -> str:
    """The setting that an error comes from, where it is set."""
    if isinstance(error, MemoryError):
        limit = "max_memory_bytes"
    elif isinstance(error, OSError) and error.errno in LIMIT_OF_ERRNO:
        limit = LIMIT_OF_ERRNO[error.errno]
    else:
        return ""
    value, _ = resource.getrlimit(LIMITS[limit])
    return "" if value == resource.RLIM_INFINITY else f" (reward.{limit} is {value})"


class RefusedError(ValueError):
    """Fault of a user's scorer; the cause, if any, is an exception of its own code."""


def load_function(path: Path, name: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The function `name` of the file.

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
    """The score and whatever came with it, as JSON can hold it.

    Raises RefusedError for anything but a finite number or a dict whose `score` is one.
    """
    extra: dict[str, Any] = {}
    score = result
    if isinstance(result, Mapping):
        if "score" not in result:
            raise RefusedError(f"the scorer returned a dict without 'score': {_shown(result)}")
        score = result["score"]
        extra = {str(name): value for name, value in result.items() if name != "score"}
    if not isinstance(score, SupportsFloat) or not math.isfinite(float(score)):
        raise RefusedError(f"the scorer returned {_shown(score)}, not a finite number")
    return float(score), json.loads(json.dumps(extra, default=str))


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RefusedError(f"reward.path {path} does not exist")
    # Under a name of its own, or a file called `math.py` would hide a module.
    private = f"_refrain_reward_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(private, path)
    if spec is None or spec.loader is None:
        raise RefusedError(f"reward.path {path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module
    # Looking at a scorer leaves no `__pycache__` beside it.
    sys.dont_write_bytecode = True
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[private]
        raise RefusedError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
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
    serve(Connection(int(sys.argv[1])))
