"""The trainer's Ray actors: they compute what the learner does, and their errors name the rank."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable

import psutil
import pytest
import ray
import safetensors.torch
import torch

from refrain.engines.learn.checkpoint import read_state
from refrain.engines.learn.trainer import TrainerError, TrainerGroup
from refrain.schemas.config import TrainConfig
from refrain.schemas.weights import PolicyWeights, WeightsFile
from tests.learn.conftest import make_batch, started
from tests.sockets import assert_on_loopback, family

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_cluster")]


WATCHED_S = 2.0
MOST_OF_A_CORE = 0.03


def _pid(actor: object) -> int:
    del actor
    return os.getpid()


@pytest.fixture
async def start() -> AsyncIterator[Callable[[TrainConfig], TrainerGroup]]:
    groups: list[TrainerGroup] = []

    def make(config: TrainConfig) -> TrainerGroup:
        groups.append(TrainerGroup(config))
        return groups[-1]

    yield make
    for group in groups:
        await group.shutdown()


def published(weights: PolicyWeights) -> dict[str, torch.Tensor]:
    assert isinstance(weights.source, WeightsFile)
    assert weights.source.num_bytes == weights.source.path.stat().st_size
    assert weights.source.node_id == ray.get_runtime_context().get_node_id()
    return safetensors.torch.load_file(weights.source.path)


async def test_trainer_sleeps_and_continues_bit_for_bit(
    make_config: Callable[..., TrainConfig],
) -> None:
    alone = started(make_config())
    group = TrainerGroup(make_config(), state_leaves=True)
    await group.start(None)
    try:
        for step in (1, 2):
            await group.enter_gpus()
            batch = make_batch(policy_version=step - 1)
            assert await group.train_step(batch) == alone.train_step(batch)
            weights = await group.publish(step)
            await group.leave_gpus()
            process = psutil.Process(await group._actors[0].handle.__ray_call__.remote(_pid))
            before = process.cpu_times()
            await asyncio.sleep(WATCHED_S)
            after = process.cpu_times()
            used_s = after.user + after.system - before.user - before.system
            assert used_s < MOST_OF_A_CORE * WATCHED_S
            with pytest.raises(TrainerError, match="call enter_gpu before training"):
                await group.train_step(batch)
            with pytest.raises(TrainerError, match="weights are not on the GPU"):
                await group.save(step, {})
        expected = safetensors.torch.load(alone.weights_buffer())
        torch.testing.assert_close(published(weights), expected, atol=0.0, rtol=0.0)
    finally:
        await group.shutdown()


async def test_two_actors_train_publish_and_save(
    make_config: Callable[..., TrainConfig], start: Callable[[TrainConfig], TrainerGroup]
) -> None:
    alone = started(make_config())
    group = start(make_config(num_processes=2, timeout_s=120.0))
    await group.start(None)
    # Each rank has one socket of Ray and one of gloo. The rendezvous is a file.
    assert_on_loopback(family(), at_least=4)
    node = ray.get_runtime_context().get_node_id()
    assert await group.nodes() == {node: "trainer rank 0, 1"}
    initial = await group.publish(0)
    expected = safetensors.torch.load(alone.weights_buffer())
    torch.testing.assert_close(published(initial), expected, atol=0.0, rtol=0.0)
    metrics = await group.train_step(make_batch())
    assert metrics == pytest.approx(alone.train_step(make_batch()), abs=1e-4)
    weights = await group.publish(1)
    assert weights.policy_version == 1
    torch.testing.assert_close(
        published(weights),
        safetensors.torch.load(alone.weights_buffer()),
        atol=1e-5,
        rtol=0.0,
    )
    given = await group.publish(1, [[5, 6, 7]])
    assert [canary.token_ids for canary in given.canaries] == [(5, 6, 7)]
    path = await group.save(1, {"epoch": 0})
    assert read_state(path).loader_state == {"epoch": 0}
    with pytest.raises(TrainerError, match=r"rank \d failed in publish.*version 7 was asked for"):
        await group.publish(7)
    directory = given.source.path.parent
    assert sorted(p.name for p in directory.iterdir()) == ["0.safetensors", "1.safetensors"]
    await group.shutdown()
    assert not directory.exists()


async def test_errors_name_the_rank(
    make_config: Callable[..., TrainConfig], start: Callable[[TrainConfig], TrainerGroup]
) -> None:
    group = start(make_config())
    await group.start(None)
    batch = make_batch()
    with pytest.raises(TrainerError, match=r"rank \d failed in train_step.*\"reward\""):
        await group.train_step(batch.drop_columns(["reward"]))
    group._actors[0].kill()
    with pytest.raises(TrainerError, match=r"rank \d failed in train_step"):
        await group.train_step(ray.put(batch))


async def test_no_wait_is_longer_than_the_limit(
    make_config: Callable[..., TrainConfig], start: Callable[[TrainConfig], TrainerGroup]
) -> None:
    group = start(make_config(timeout_s=0.01))
    with pytest.raises(TrainerError, match=r"\[0\] did not finish restore within .* 0.01 s"):
        await group.start(None)
