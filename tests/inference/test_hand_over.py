"""A trainer hands weights to a real engine by vLLM's `ipc` backend. Only the GPUs are stand-ins.

The engine takes the handed weights or the file. Whatever fails, it never uses other weights.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from refrain.engines.actors import RemoteActor
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.inference.weights.canary import FLOAT32_TOLERANCE
from refrain.engines.inference.weights.hand_over import HandOver
from refrain.engines.learn.trainer import TrainerGroup
from refrain.engines.rollout.interface import WeightSyncError
from refrain.schemas.config import TrainConfig
from refrain.schemas.weights import PolicyWeights, WeightsFile
from tests.inference.hand_over import GPUS, Disturbed, EngineWithGpu, RankWithGpu
from tests.inference.real import CONFIG, requests
from tests.inference.switching import generate

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

LIMIT_S = 120.0
TRAINED = CONFIG.model_copy(
    update={"trainer": CONFIG.trainer.model_copy(update={"num_processes": len(GPUS)})}
)


class Pair:
    """An engine, and a trainer that hands weights to it."""

    def __init__(self, engine: RayEngine, config: TrainConfig = TRAINED) -> None:
        self.engine = engine
        self.handle = Disturbed(None, "counted")
        self.limit_s = LIMIT_S
        self.trainer = TrainerGroup(config, receivers=lambda: self._receivers())
        self.version = 0

    def _receivers(self) -> HandOver:
        return HandOver({self.engine.index: self.handle}, self.limit_s)

    async def start(self) -> None:
        ranks = [
            RemoteActor(f"trainer rank {rank}", RankWithGpu, TRAINED, rank)
            for rank in range(len(GPUS))
        ]
        self.trainer.adopt([rank.handle for rank in ranks])
        address = await ranks[0].call("host_rendezvous", True, timeout_s=LIMIT_S)
        await self.trainer._call("join", address)
        await self.trainer._call("restore", None)

    async def hand_over(self, canaries: list, how: str, limit_s: float = LIMIT_S) -> PolicyWeights:
        """Publish another policy version while the engine sleeps. Return its weights."""
        await self.engine.sleep()
        self.version += 1
        self.limit_s = limit_s
        self.handle = Disturbed(self.engine.actor, how)
        await self.trainer._call("change", self.version)
        return await self.trainer.publish(self.version, canaries)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(ray_cluster) -> AsyncIterator[Pair]:
    assert ray_cluster.is_initialized()
    engine = RayEngine(0, CONFIG.engine, num_gpus=0, engine_class=EngineWithGpu)
    made = Pair(engine)
    await asyncio.gather(engine.start(), made.start())
    yield made
    await made.trainer.shutdown()
    await engine.shutdown()


def without_file(weights: PolicyWeights) -> PolicyWeights:
    """Return the weights with the path of a missing file."""
    assert isinstance(weights.source, WeightsFile)
    return replace(weights, source=replace(weights.source, path=weights.source.path.with_name("0")))


async def test_handed_weights_equal_those_of_the_file(pair, prompts):
    """Handed weights need no file, and give the same tokens as the file."""
    for _ in range(2):
        weights = await pair.hand_over(prompts[:4], "counted")
        assert weights.not_handed == ()
        assert not await pair.engine.wake()
        assert await pair.engine.load_weights(without_file(weights)) < FLOAT32_TOLERANCE
    handed = await generate(pair.engine, requests(prompts[:4]))
    with pytest.raises(WeightSyncError, match="is gone"):
        await pair.engine.load_weights(without_file(weights))
    assert await pair.engine.load_weights(weights) < FLOAT32_TOLERANCE
    loaded = await generate(pair.engine, requests(prompts[:4]))
    assert {id: r.generated.token_ids for id, r in handed.items()} == {
        id: r.generated.token_ids for id, r in loaded.items()
    }


@pytest.mark.parametrize("how", ["lost", "late"])
async def test_lost_or_late_updates_are_refused(pair, prompts, how):
    """The engine refuses weights if one update was lost or late. Then it loads the file."""
    weights = await pair.hand_over(prompts[:4], how)
    assert weights.not_handed == ()
    await pair.engine.wake()
    # The engine names the layers if they had weights before. Otherwise the canary notices.
    told = r"engine 0 after .* (took no new weights|differs from the trainer)"
    with pytest.raises(WeightSyncError, match=told):
        await pair.engine.load_weights(weights)
    assert await pair.engine.load_weights(weights) < FLOAT32_TOLERANCE


@pytest.mark.parametrize(
    ("how", "why", "limit_s"),
    [
        ("elsewhere", "IPC handle not found for GPU UUID", LIMIT_S),
        ("silent", "gave no answer to take_handed in 5 s", 5.0),
    ],
)
async def test_engine_that_refuses_weights_loads_the_file(pair, prompts, how, why, limit_s):
    """The result names an engine that fails or does not answer. It loads the file."""
    weights = await pair.hand_over(prompts[:4], how, limit_s)
    (said,) = weights.not_handed
    assert said.startswith("rollout engine 0")
    assert why in said
    await pair.engine.wake()
    assert await pair.engine.load_weights(weights) < FLOAT32_TOLERANCE
    again = await pair.hand_over(prompts[:4], "counted")
    assert again.not_handed == ()
    assert await pair.engine.load_weights(without_file(again)) < FLOAT32_TOLERANCE


async def test_engine_that_dies_loads_the_file(pair, prompts):
    """The result names an engine that dies. After its restart it loads the file."""
    weights = await pair.hand_over(prompts[:4], "killed")
    (said,) = weights.not_handed
    assert said.startswith("rollout engine 0 failed in take_handed: ActorDiedError")
    await pair.engine.start()
    assert await pair.engine.load_weights(weights) < FLOAT32_TOLERANCE


async def test_of_another_version_they_are_not_taken_for_it(pair, prompts):
    """Asked for an older version, the engine loads its file instead of the handed weights."""
    before = await pair.hand_over(prompts[:4], "counted")
    await pair.hand_over(prompts[:4], "counted")
    await pair.engine.wake()
    assert await pair.engine.load_weights(before) < FLOAT32_TOLERANCE
