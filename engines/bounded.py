"""Waits with a time limit, and other helpers for asyncio."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Never, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

POLL_S = 1.0
"""Longest time between two checks of progress."""


async def wait_for(awaitable: Awaitable[T], timeout_s: float) -> T:
    """Return the result of the awaitable. Raise TimeoutError after `timeout_s`.

    `asyncio.wait_for` before Python 3.12 may lose a cancellation that arrives together with the
    result; this function does not. It also takes Ray's object references, which are no coroutines.
    """
    async with asyncio.timeout(timeout_s):
        return await awaitable


async def wait_while_moving(
    awaitable: Awaitable[T], progress: Callable[[], Awaitable[object]], stall_s: float
) -> T:
    """Return the result of the awaitable. Wait as long as the value of `progress` changes.

    Raise TimeoutError if `progress` returns the same value, or does not answer, for `stall_s`
    seconds.
    """

    async def watch() -> Never:
        last: object = None
        while True:
            async with asyncio.timeout(stall_s):
                await asyncio.sleep(poll_s)
                while (now := await progress()) == last:
                    await asyncio.sleep(poll_s)
            last = now

    poll_s = min(POLL_S, stall_s / 10)
    waiting, watching = asyncio.create_task(_result(awaitable)), asyncio.create_task(watch())
    try:
        done, _ = await asyncio.wait({waiting, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await (waiting if waiting in done else watching)
    finally:
        await cancel([waiting, watching])


async def _result(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def call_in_thread(call: Callable[[], T], timeout_s: float) -> T:
    """Make the call in a thread and return its answer.

    Raise TimeoutError if there is no answer after `timeout_s`, or if `call` raises. The thread is
    abandoned then.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        result = call()
        with suppress(RuntimeError):  # The event loop may have ended.
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(result))

    threading.Thread(target=run, daemon=True, name="bounded call").start()
    return await wait_for(answer, timeout_s)


@asynccontextmanager
async def together() -> AsyncGenerator[asyncio.TaskGroup]:
    """Open a task group that raises its first error itself, not a group of errors.

    As in any task group, an error cancels the other tasks.
    """
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__


async def gather_all(awaitables: Iterable[Awaitable]) -> list:
    """Return all results. If some fail, wait until all have ended, then raise the first error."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class LoopTurns:
    """Lets a few tasks at a time pass, so that a burst of them does not block the event loop."""

    def __init__(self, num: int) -> None:
        """`num`: tasks that may pass in one turn of the event loop."""
        self._num = num
        self._passed: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()
        """Tasks that passed in this turn."""

    async def take(self) -> None:
        """Return now if the task may go on in this turn, else in a later one."""
        loop = asyncio.get_running_loop()
        while (passed := self._passed.get(loop, 0)) >= self._num:
            await asyncio.sleep(0)
        if not passed:
            loop.call_soon(self._passed.pop, loop, None)
        self._passed[loop] = passed + 1


def is_cancelled() -> bool:
    """Return whether the current task was cancelled, even if another error was raised since."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def cancel(tasks: Iterable[asyncio.Task]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
