"""No wait without bound."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


async def wait_for(awaitable: Awaitable[T], timeout_s: float) -> T:
    """`asyncio.wait_for` that takes Ray's object references too, which are no coroutines."""

    async def result() -> T:
        return await awaitable

    return await asyncio.wait_for(result(), timeout_s)


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


async def cancel(tasks: Iterable[asyncio.Task]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
