"""Waiting for several at once."""

import asyncio

import pytest

from engines.bounded import together


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
