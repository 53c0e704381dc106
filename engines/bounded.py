"""No wait without bound."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Never, TypeVar

T = TypeVar("T")

POLL_S = 1.0
"""Between two looks at how far something is, at most."""


async def wait_for(awaitable: Awaitable[T], timeout_s: float) -> T:
    """Result of the awaitable. Raises TimeoutError.

    Unlike `asyncio.wait_for` before Python 3.12 it does not lose a cancellation that comes at the
    moment of the result, and it takes Ray's object references, which are no coroutines.
    """
    async with asyncio.timeout(timeout_s):
        return await awaitable


async def wait_while_moving(
    awaitable: Awaitable[T], progress: Callable[[], Awaitable[object]], stall_s: float
) -> T:
    """Result of the awaitable, waited for while what `progress` gives changes.

    Raises TimeoutError when it has given the same value, or none at all, for `stall_s` seconds.
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


async def ask_aside(ask: Callable[[], T], timeout_s: float) -> T:
    """Answer from a thread; nobody waits longer for one that does not come, or fails to. Raises
    TimeoutError."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell() -> None:
        told = ask()
        with suppress(RuntimeError):  # The loop has ended meanwhile.
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(told))

    threading.Thread(target=tell, daemon=True, name="asked aside").start()
    return await wait_for(answer, timeout_s)


@asynccontextmanager
async def together() -> AsyncGenerator[asyncio.TaskGroup]:
    """A task group that raises its first error itself: one that fails ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__


async def all_of(awaitables: Iterable[Awaitable]) -> list:
    """Every result, or the first error once all the others have ended: nothing is left running."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def is_cancelled() -> bool:
    """Whether somebody has cancelled the task that is running, whatever has been raised since."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def cancel(tasks: Iterable[asyncio.Task]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
