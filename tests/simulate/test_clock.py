"""Virtual time: sleeps take no real time, events keep their order, and a deadlock is an error."""

import asyncio
import time

import pytest

from refrain.engines.simulate.clock import run_virtual


def test_a_day_passes_at_once_and_in_order():
    seen = []

    async def wait(name: str, seconds: float):
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def both():
        await asyncio.gather(wait("day", 86400.0), wait("hour", 3600.0), wait("second", 1.0))

    started = time.monotonic()
    run_virtual(both())
    assert time.monotonic() - started < 5.0
    assert [name for name, _ in seen] == ["second", "hour", "day"]
    assert [at for _, at in seen] == pytest.approx([1.0, 3600.0, 86400.0])


def test_the_clock_stands_still_while_callbacks_run():
    async def twice():
        loop = asyncio.get_running_loop()
        before = loop.time()
        time.sleep(0.01)
        await asyncio.sleep(0)
        return before, loop.time()

    assert run_virtual(twice()) == (0.0, 0.0)


def test_deadlock_is_an_error():
    async def forever():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="every task waits for another one"):
        run_virtual(forever())
