"""Waits: with a timeout, for as long as the work moves, and for several tasks at once."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from refrain.engines.bounded import LoopTurns, call_in_thread, together, wait_for, wait_while_moving
from refrain.engines.simulate.clock import run_virtual


async def test_a_wait_ends_in_time():
    never = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(10.0):
        with pytest.raises(TimeoutError):
            await wait_for(never, 0.01)
    assert never.cancelled(), "the future still waits"
    assert await wait_for(asyncio.sleep(0, "done"), 10.0) == "done"


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancellation_at_the_moment_of_the_result_is_not_lost(turns):
    """`turns`: turns of the event loop between the result and the cancellation."""
    answer = asyncio.get_running_loop().create_future()

    async def ask_for_ever() -> None:
        while True:
            await wait_for(answer, 60.0)
            await asyncio.sleep(3600.0)

    asking = asyncio.create_task(ask_for_ever())
    await asyncio.sleep(0.01)
    answer.set_result("now")
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking}, timeout=1.0)
    assert asking.cancelled()


STALL_S = 60.0


def moving_at(*moves_s: float) -> Callable[[], Awaitable[int]]:
    """Return progress that changes at each of these times, sometimes to a smaller number."""

    async def progress() -> int:
        now_s = asyncio.get_running_loop().time()
        return sum(move_s <= now_s for move_s in moves_s) % 3

    return progress


@pytest.mark.parametrize("delay_s", [0.0, 2.0])
def test_progress_extends_the_wait(delay_s):
    """Progress may come at once or after a delay."""
    moves = moving_at(*range(50, 7_000, 50))

    async def progress() -> int:
        await asyncio.sleep(delay_s)
        return await moves()

    hours = asyncio.sleep(7_000.0, "done")
    assert run_virtual(wait_while_moving(hours, progress, STALL_S)) == "done"


@pytest.mark.parametrize("moves_s", [(), (50.0,), (50.0, 100.0)])
def test_stalled_call_times_out(moves_s):
    async def wait() -> float:
        never = asyncio.get_running_loop().create_future()
        with pytest.raises(TimeoutError):
            await wait_while_moving(never, moving_at(*moves_s), STALL_S)
        assert never.cancelled(), "the future still waits"
        return asyncio.get_running_loop().time()

    last_s = moves_s[-1] if moves_s else 0.0
    assert last_s + STALL_S <= run_virtual(wait()) <= last_s + STALL_S + 2.0


def test_call_without_progress_report_times_out():
    async def wait() -> float:
        loop = asyncio.get_running_loop()
        asked = loop.create_future()
        with pytest.raises(TimeoutError):
            await wait_while_moving(loop.create_future(), lambda: asked, STALL_S)
        assert asked.cancelled()
        return loop.time()

    assert run_virtual(wait()) <= STALL_S + 2.0


def test_an_error_ends_the_wait_at_once():
    """The work or the question about its progress may raise it."""

    async def fail(after_s: float) -> int:
        await asyncio.sleep(after_s)
        raise ValueError("odd")

    async def both() -> float:
        with pytest.raises(ValueError, match="odd"):
            await wait_while_moving(fail(5.0), moving_at(), STALL_S)
        with pytest.raises(ValueError, match="odd"):
            await wait_while_moving(asyncio.sleep(9.0), lambda: fail(1.0), STALL_S)
        return asyncio.get_running_loop().time()

    assert run_virtual(both()) <= 10.0


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


async def test_an_answer_that_does_not_come_is_not_waited_for():
    stuck = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask():
        asyncio.run_coroutine_threadsafe(stuck.wait(), loop).result()

    with pytest.raises(TimeoutError):
        await call_in_thread(ask, 0.05)
    stuck.set()
    assert await call_in_thread(lambda: 7, 5.0) == 7


async def test_a_burst_of_tasks_passes_over_several_turns_of_the_loop():
    turns, turn, passed = LoopTurns(3), 0, []

    async def count_turns():
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def task(i: int):
        await turns.take()
        passed.append((turn, i))

    counting = asyncio.create_task(count_turns())
    await asyncio.gather(*map(task, range(10)))
    counting.cancel()
    assert sorted(i for _, i in passed) == list(range(10))
    assert list(Counter(turn for turn, _ in passed).values()) == [3, 3, 3, 1]
    for i in range(10):
        await task(i)
        await asyncio.sleep(0)


def test_turns_of_a_loop_that_has_ended_hold_nobody_up():
    turns = LoopTurns(1)
    for _ in range(3):
        asyncio.run(asyncio.wait_for(turns.take(), 5.0))
