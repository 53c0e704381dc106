"""A policy that takes its time: the event loop goes on, and errors and delays are told."""

import asyncio
import time

import pytest

from engines.rollout import asking
from tests.rollout.fakes import FakeEngine, Recorder, work

THINKS_S = 0.5


class Thinker:
    def __init__(self, error=None):
        self.error, self.num_asked, self.asked_by = error, 0, set()

    def decide(self, view):
        assert view.engines
        self.num_asked += 1
        self._think()
        return []

    def begin(self, view):
        assert view.engines
        self._think()
        return []

    def _think(self):
        if self.num_asked > 2:
            return
        time.sleep(THINKS_S)
        if self.error:
            raise self.error


async def longest_block_s(policy, *, aside):
    """Longest time for which the loop did nothing else."""
    recorder = Recorder([FakeEngine(0), FakeEngine(1)], decides_aside=aside)
    await recorder.coordinator.start()
    longest_s = 0.0

    async def watch():
        nonlocal longest_s
        while True:
            at_s = time.perf_counter()
            await asyncio.sleep(0.002)
            longest_s = max(longest_s, time.perf_counter() - at_s)

    watching = asyncio.create_task(watch())
    try:
        await recorder.roll_out(1, work(1, [5, 9]), policies=[policy])
    finally:
        watching.cancel()
        await recorder.coordinator.shutdown()
    assert len(recorder.finished[1]) == 2
    return longest_s


async def test_the_loop_goes_on_while_a_policy_thinks():
    thinker = Thinker()
    assert await longest_block_s(thinker, aside=True) < THINKS_S / 2
    assert thinker.num_asked > 2
    assert await longest_block_s(Thinker(), aside=False) >= THINKS_S


@pytest.mark.parametrize("aside", [True, False])
async def test_an_error_of_a_policy_is_the_stages(aside):
    with pytest.raises(ZeroDivisionError, match="of the policy"):
        await longest_block_s(Thinker(ZeroDivisionError("of the policy")), aside=aside)


async def test_one_that_never_ends_is_named(monkeypatch):
    monkeypatch.setattr(asking, "DECIDE_TIMEOUT_S", 0.02)
    with pytest.raises(TimeoutError, match=r"Thinker took more than 0.02 s .* pat.tp_degrees"):
        await longest_block_s(Thinker(), aside=True)
