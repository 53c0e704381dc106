"""No wait without bound."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def wait_for(awaitable: Awaitable[T], timeout_s: float) -> T:
    """`asyncio.wait_for` that takes Ray's object references too, which are no coroutines."""

    async def result() -> T:
        return await awaitable

    return await asyncio.wait_for(result(), timeout_s)


async def bounded(awaitable: Awaitable[T], timeout_s: float, what: str) -> T:
    """The result, or a RuntimeError that names what did not happen in time."""
    try:
        return await wait_for(awaitable, timeout_s)
    except TimeoutError as error:
        raise RuntimeError(f"{what}: no answer in {timeout_s:.0f} s") from error
