"""Waiting: for no longer than said, and for several at once."""

import asyncio

import pytest

from engines.bounded import together, wait_for


async def test_a_wait_ends_in_time():
    never = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(10.0):
        with pytest.raises(TimeoutError):
            await wait_for(never, 0.01)
    assert never.cancelled(), "nobody waits any longer"
    assert await wait_for(asyncio.sleep(0, "done"), 10.0) == "done"


async def test_the_first_error_ends_the_others_and_keeps_its_cause():
    cause, others = OSError("remote traceback"), []

    async def fail():
        raise ValueError("odd") from cause

    async def run():
        async with together() as group:
            others.append(group.create_task(asyncio.sleep(60)))
            group.create_task(fail())

    with pytest.raises(ValueError, match="odd") as raised:
        await run()
    assert raised.value.__cause__ is cause
    assert others[0].cancelled()
