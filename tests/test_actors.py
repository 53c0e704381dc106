"""An actor's failure names the actor, the call and the cause."""

import asyncio
import os
import time

import pytest

from refrain.engines.actors import ActorError, ActorGone, NoAnswer, RemoteActor

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_cluster")]


class Worker:
    def __init__(self, log):
        self.log = log
        self.num = 0

    def echo(self, text):
        return text

    def fail(self, error):
        raise error

    def sleep(self, seconds):
        time.sleep(seconds)

    def count(self, num, seconds):
        for self.num in range(num):
            time.sleep(seconds)
        return num

    def num_counted(self):
        return self.num

    def end(self):
        os._exit(1)

    def shutdown(self):
        self.log.write_text("shut down")


@pytest.fixture
def worker(tmp_path):
    actor = RemoteActor("worker 7", Worker, tmp_path / "log")
    yield actor
    actor.kill()


@pytest.mark.parametrize("error", [ValueError("odd"), TimeoutError("odd")])
async def test_error_of_the_actor_is_reported_and_kept(worker, error):
    """A TimeoutError that the actor raises does not count as a missing answer."""
    assert await worker.call("echo", "hello", timeout_s=60) == "hello"
    with pytest.raises(ActorError) as raised:
        await worker.call("fail", error, timeout_s=60)
    assert str(raised.value) == f"worker 7 failed in fail: {type(error).__name__}: odd"
    assert type(raised.value) is ActorError
    assert type(raised.value.cause) is type(error)


async def test_no_wait_is_longer_than_its_limit(worker):
    await worker.call("echo", "there", timeout_s=60)
    with pytest.raises(NoAnswer, match=r"^worker 7 gave no answer to sleep in 1 s$"):
        await worker.call("sleep", 5, timeout_s=1)


@pytest.fixture
def watched(tmp_path):
    options = {"watched": True, "max_restarts": 1, "max_task_retries": 1}
    actor = RemoteActor("worker 7", Worker, tmp_path / "log", **options)
    yield actor
    actor.kill()


async def test_a_call_that_moves_takes_as_long_as_it_takes(watched):
    counting = watched.call_while_moving("count", 12, 0.5, progress="num_counted", stall_s=4.0)
    assert await counting == 12


async def test_a_call_that_ray_repeats_is_waited_for(watched):
    counting = asyncio.create_task(
        watched.call_while_moving("count", 6, 0.5, progress="num_counted", stall_s=60.0)
    )
    await asyncio.sleep(2.0)
    watched.restart()
    assert await counting == 6


async def test_a_call_that_stands_still_is_waited_for_no_longer(watched):
    hangs = watched.call_while_moving("sleep", 60, progress="num_counted", stall_s=2.0)
    with pytest.raises(NoAnswer, match=r"^worker 7 stood still in sleep for 2 s$"):
        await hangs


async def test_watched_call_reports_deaths_and_errors(watched):
    with pytest.raises(ActorError, match="failed in fail: ValueError: odd"):
        await watched.call_while_moving(
            "fail", ValueError("odd"), progress="num_counted", stall_s=60
        )
    with pytest.raises(ActorGone, match=r"failed in end: Actor\w+Error"):
        await watched.call_while_moving("end", progress="num_counted", stall_s=60)


async def test_death_is_reported_immediately(worker):
    with pytest.raises(ActorGone, match=r"^worker 7 failed in end: Actor\w+Error$"):
        await worker.call("end", timeout_s=60)
    await worker.stop()


async def test_actor_shuts_down_before_it_is_killed(worker, tmp_path):
    await worker.stop()
    assert (tmp_path / "log").read_text() == "shut down"

    async def ask_until_it_is_gone() -> None:
        while True:  # Ray's kill takes a moment.
            await worker.call("echo", "gone", timeout_s=60)

    with pytest.raises(ActorGone):
        await asyncio.wait_for(ask_until_it_is_gone(), 60)
