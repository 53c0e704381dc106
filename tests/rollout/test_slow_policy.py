"""A slow policy does not block the event loop. Its errors and timeouts fail the stage."""

import asyncio
import time

import pytest

from refrain.engines.rollout import slow_policy
from tests.rollout.fakes import FakeEngine, Recorder, work

THINKS_S = 0.3


class Thinker:
    def __init__(self, error=None):
        self.error, self.num_asked, self.num_ticks = error, 0, 0
        self.ticks = []
        """Iterations of the event loop during each decision."""

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
        before = self.num_ticks
        time.sleep(THINKS_S)
        self.ticks.append(self.num_ticks - before)
        if self.error:
            raise self.error


async def roll_out(policy, *, in_thread):
    recorder = Recorder([FakeEngine(0), FakeEngine(1)], decide_in_thread=in_thread)
    await recorder.coordinator.start()

    async def watch():
        while True:
            await asyncio.sleep(0.002)
            policy.num_ticks += 1

    watching = asyncio.create_task(watch())
    try:
        await recorder.roll_out(1, work(1, [5, 9]), policies=[policy])
    finally:
        watching.cancel()
        await recorder.coordinator.shutdown()
    assert len(recorder.finished[1]) == 2


async def test_event_loop_runs_while_a_policy_decides():
    beside, within = Thinker(), Thinker()
    await roll_out(beside, in_thread=True)
    await roll_out(within, in_thread=False)
    assert beside.num_asked > 2
    assert min(beside.ticks) > 3
    assert set(within.ticks) == {0}


@pytest.mark.parametrize("in_thread", [True, False])
async def test_an_error_of_a_policy_is_the_stages(in_thread):
    with pytest.raises(ZeroDivisionError, match="of the policy"):
        await roll_out(Thinker(ZeroDivisionError("of the policy")), in_thread=in_thread)


async def test_policy_that_never_ends_is_named(monkeypatch):
    monkeypatch.setattr(slow_policy, "DECIDE_TIMEOUT_S", 0.02)
    with pytest.raises(slow_policy.SlowPolicy, match=r"Thinker took more than 0.02 s to decide"):
        await roll_out(Thinker(), in_thread=True)


async def test_a_stopped_process_is_no_slow_policy(monkeypatch):
    """The event loop stands still past the limit, as after SIGSTOP, and then the policy goes on."""
    monkeypatch.setattr(slow_policy, "DECIDE_TIMEOUT_S", 1.0)
    stopped = asyncio.Event()

    def decide():
        loop.call_soon_threadsafe(stopped.set)
        time.sleep(1.7)
        return ["decided"]

    async def stop():
        await stopped.wait()
        time.sleep(1.5)

    loop, stopping = asyncio.get_running_loop(), asyncio.create_task(stop())
    assert await slow_policy._ask(Thinker(), decide, in_thread=True) == ["decided"]
    await stopping
