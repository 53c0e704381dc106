"""The process in which a user's scorer runs.

It talks over one pipe. First it receives the function to load and
answers READY or FAILED; then it receives lists of calls and answers for each, in any order, STARTED
and then DONE or FAILED. The other side keeps the clock and kills what hangs.
"""

import asyncio
import inspect
import os
import threading
import time
import traceback
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from engines.reward.function import RefusedError, checked_score, load_function

Call = dict[str, Any]
"""Keyword arguments of one call of the scorer."""

MAX_TRACEBACK_CHARACTERS = 4000


class Reply(StrEnum):
    READY = "ready"
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


def run(descriptor: int) -> None:
    """The process's life: file descriptor `descriptor` is its end of the pipe."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    serve(Connection(descriptor))


def serve(connection: Connection) -> None:
    try:
        path, name, kwargs = connection.recv()
        function = partial(load_function(path, name, kwargs), **kwargs)
    except Exception as error:
        connection.send((Reply.FAILED, -1, _explain(error)))
        return
    connection.send((Reply.READY, -1, None))
    with asyncio.Runner() as runner:
        while calls := _receive(connection):
            if inspect.iscoroutinefunction(function):
                runner.run(_score_together(connection, function, calls))
            else:
                for index, call in enumerate(calls):
                    _score(connection, function, index, call, runner)


def _receive(connection: Connection) -> list[Call] | None:
    try:
        return connection.recv()
    except EOFError:
        return None


def _score(
    connection: Connection,
    function: Callable[..., Any],
    index: int,
    call: Call,
    runner: asyncio.Runner,
) -> None:
    # Not inside the loop: plain code may call `asyncio.run` itself.
    connection.send((Reply.STARTED, index, None))
    try:
        result = function(**call)
        if inspect.isawaitable(result):
            result = runner.run(_wait_for(result))
        connection.send((Reply.DONE, index, checked_score(result)))
    except Exception as error:
        connection.send((Reply.FAILED, index, _explain(error)))


async def _score_together(
    connection: Connection, function: Callable[..., Any], calls: list[Call]
) -> None:
    async def score(index: int, call: Call) -> None:
        connection.send((Reply.STARTED, index, None))
        try:
            connection.send((Reply.DONE, index, checked_score(await function(**call))))
        except Exception as error:
            connection.send((Reply.FAILED, index, _explain(error)))

    await asyncio.gather(*(score(index, call) for index, call in enumerate(calls)))


async def _wait_for(result: Any) -> Any:
    return await result


def _explain(error: Exception) -> str:
    """The message; with the traceback where the user's code, not refrain, raised."""
    message, raised = str(error), error.__cause__
    if not isinstance(error, RefusedError):
        message, raised = f"{type(error).__name__}: {error}", error
    if raised is None:
        return message
    lines = "".join(traceback.format_exception(raised))
    return f"{message}\n{lines[-MAX_TRACEBACK_CHARACTERS:]}"


def _end_with_parent(parent: int) -> None:
    """A scorer that hangs would outlive a parent that was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
