"""Follow calls of this repository's functions, across tasks, queues and Ray calls of a process.

The path to a call has each function that handed control on, once and in order:

    call or await     both functions are on the stack
    asyncio task      the path to its creation comes first
    asyncio.Queue     the path to `put` comes first, in the task that gets the item

A function that has returned before is not on the path. For example, `f(g())` calls `f` without `g`.
"""

import asyncio
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_LED_HERE: ContextVar[Sequence[str]] = ContextVar("led_here", default=())
"""Path to the creation of the current task, or to the item that it got last."""


def joined(*paths: Iterable[str]) -> list[str]:
    """Return consecutive paths as one. A function that comes again counts once."""
    return list(dict.fromkeys(function for path in paths for function in path))


class CallTracer:
    """Follows functions of the files in these folders."""

    def __init__(self, root: Path, folders: Sequence[str]) -> None:
        self._root = root
        self._folders = tuple(f"{root / folder}/" for folder in folders)

    def path(self) -> list[str]:
        """Return the path to the caller, each function as `file:function`."""
        return joined(_LED_HERE.get(), self._stack())

    def _stack(self) -> list[str]:
        frame, functions = sys._getframe(1), []
        while frame:
            code = frame.f_code
            if code.co_filename.startswith(self._folders) and code.co_name not in _COMPREHENSIONS:
                file = Path(code.co_filename).relative_to(self._root)
                functions.append(f"{file}:{code.co_qualname}")
            frame = frame.f_back
        return functions[::-1]

    @contextmanager
    def following(self) -> Generator[None]:
        """Follow the tasks of this event loop, and the queues that are made meanwhile."""
        loop = asyncio.get_running_loop()
        before = loop.get_task_factory()
        loop.set_task_factory(self._make_task)
        try:
            with patch("asyncio.Queue", _queue_class(self)):
                yield
        finally:
            loop.set_task_factory(before)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any
    ) -> asyncio.Task:
        context = options.pop("context", None) or copy_context()
        context.run(_LED_HERE.set, self.path())
        return asyncio.Task(work, loop=loop, context=context, **options)


def _queue_class(tracer: CallTracer) -> Any:
    class FollowedQueue(asyncio.Queue):
        def _put(self, item: Any) -> None:
            super()._put((tracer.path(), item))

        def _get(self) -> Any:
            path, item = super()._get()
            _LED_HERE.set(path)
            return item

    return FollowedQueue
