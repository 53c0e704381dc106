"""An engine leaves its memory to the trainer and comes back, and no token changes."""

import asyncio
from dataclasses import replace

import psutil
import pytest

from refrain.engines.rollout.interface import WeightSyncError
from tests.inference.real import requests
from tests.inference.switching import generate

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="package"),
]

WATCHED_S = 3.0
MOST_OF_A_CORE = 0.03
LEAST_FREED = 20 * 2**20


def _pid(engine) -> int:
    del engine
    return psutil.Process().pid


async def processes_of(engine) -> list[psutil.Process]:
    actor = psutil.Process(await engine._actor.handle.__ray_call__.remote(_pid))
    return [actor, *actor.children(recursive=True)]


def resident(processes) -> int:
    return sum(process.memory_info().rss for process in processes)


def cpu_s(processes) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def test_asleep_it_holds_no_core_and_no_keys_and_values(engines, weights, prompts):
    """A sleeping engine uses almost no CPU time and has freed its KV cache."""
    engine = engines[0]
    await engine.load_weights(weights)
    before = await generate(engine, requests(prompts))
    processes = await processes_of(engine)
    at_work = resident(processes)
    await engine.sleep()
    asleep, since_s = resident(processes), cpu_s(processes)
    await asyncio.sleep(WATCHED_S)
    assert cpu_s(processes) - since_s < MOST_OF_A_CORE * WATCHED_S
    assert at_work - asleep > LEAST_FREED
    assert not await engine.wake(), "its weights are those of an earlier policy version"
    await engine.load_weights(weights)
    after = await generate(engine, requests(prompts))
    assert {id: r.generated.token_ids for id, r in after.items()} == {
        id: r.generated.token_ids for id, r in before.items()
    }


async def test_asleep_it_takes_no_requests(engines, weights, prompts):
    engine = engines[0]
    await engine.load_weights(weights)
    await engine.sleep()
    with pytest.raises(Exception, match="no weights loaded"):
        await engine.submit(requests(prompts)[:1])
    await engine.wake()
    await engine.load_weights(weights)


async def test_parked_and_then_asleep_its_new_weights_are_checked_when_it_wakes(engines, weights):
    engine, canary = engines[0], weights.canaries[0]
    shifted = tuple(x - 1.0 for x in canary.trainer_logprobs)
    wrong = replace(canary, trainer_logprobs=shifted, rounded_logprobs=shifted)
    await engine.load_weights(weights)
    await engine.park()
    await engine.sleep()
    assert await engine.load_weights(replace(weights, canaries=(wrong,))) == 0.0
    with pytest.raises(WeightSyncError, match="differs from the trainer"):
        await engine.wake()
    await engine.load_weights(weights)
