"""Real engines that all tests of this folder share, because they take a minute to start."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest
import pytest_asyncio

from refrain.engines.data.dataset import load_dataset, load_tokenizer
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.learn.learner import Learner
from refrain.schemas.drafting import DraftingConfig, SpecActorConfig
from refrain.schemas.rollout import RequestId, Rollout, RolloutRequest
from tests.inference.heads import random_head
from tests.inference.pace import PacedEngine, dial
from tests.inference.real import CONFIG, requests, roll_out, weights_of
from tests.inference.switching import BLOCK, double_requests, engine_of, generate, longest


@pytest.fixture(scope="package")
def learner() -> Learner:
    learner = Learner(CONFIG)
    learner.restore(None)
    return learner


@pytest.fixture(scope="package")
def prompts() -> list[tuple[int, ...]]:
    dataset = load_dataset(CONFIG.data.train, load_tokenizer(CONFIG.model.path), 128)
    return [prompt.token_ids for prompt in dataset.prompts[:32]]


@pytest.fixture(scope="package")
def history_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("history")


@pytest.fixture
def history(history_dir: Path) -> Iterator[Path]:
    """Return the engines' history directory. What a test writes there is deleted, even if it fails:
    the next test's engines would draft from it."""
    yield history_dir
    for path in history_dir.iterdir():
        rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(scope="package")
def head_dir(tmp_path_factory) -> Path:
    """Return a directory with a draft head that is nearly always wrong."""
    return random_head(tmp_path_factory.mktemp("head"))


def with_head(directory: Path) -> SpecActorConfig:
    return CONFIG.specactor.model_copy(update={"head": directory})


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def engines(ray_cluster, history_dir, head_dir):
    """Engine 0 never drafts. Engine 1 drafts from history (empty at first), or as the request asks.

    Both can save and load keys and values.
    """
    assert ray_cluster.is_initialized()
    off = {"drafting": DraftingConfig(enabled=False), "specactor": SpecActorConfig()}
    pooled = CONFIG.engine.model_copy(update={"pooled": True})
    configs = [
        pooled.model_copy(update=off),
        pooled.model_copy(update={"history_dir": history_dir, "specactor": with_head(head_dir)}),
    ]
    engines = [
        RayEngine(i, config, num_gpus=0, engine_class=PacedEngine)
        for i, config in enumerate(configs)
    ]
    await asyncio.gather(*(engine.start() for engine in engines))
    yield engines
    for engine in engines:
        await engine.shutdown()


@pytest_asyncio.fixture(loop_scope="package")
async def ungated(engines) -> AsyncIterator[None]:
    """Let drafters draft at once and everywhere, however slow or fast this machine's steps are."""
    await dial(engines, 1.0)
    yield
    await dial(engines, 1.0, gate=True)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def on_one_engine(engines, learner, prompts):
    """Return the reference: all rollouts of all prompts, generated on engine 0."""
    todo = [(0, request) for request in requests(prompts)]
    finished, _ = await roll_out(engines, weights_of(learner, prompts), todo)
    assert len(finished) == len(todo)
    return finished


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def tp2(ray_cluster, history_dir, head_dir):
    """Engine 2, with TP 2. It drafts as engine 1 does."""
    assert ray_cluster.is_initialized()
    engine = engine_of(2, 2, history_dir=history_dir, specactor=with_head(head_dir))
    await engine.start()
    yield engine
    await engine.shutdown()


@pytest.fixture
def weights(learner, prompts):
    return weights_of(learner, prompts)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def without_switch(engines, learner, prompts) -> dict[RequestId, Rollout]:
    """Return the reference for moved requests: all of them finish on engine 0."""
    await engines[0].load_weights(weights_of(learner, prompts))
    return await generate(engines[0], double_requests(prompts))


@pytest.fixture
def long_requests(prompts, without_switch) -> list[RolloutRequest]:
    return longest(double_requests(prompts), without_switch)


@pytest.fixture
def long_prompts(prompts, long_requests) -> list[RolloutRequest]:
    """Return long requests whose prompts share their first two blocks."""
    many = tuple(token for prompt in prompts for token in prompt)
    return [
        replace(
            r,
            prompt_token_ids=(*many[: 2 * BLOCK], *r.prompt_token_ids[-20:]),
            max_response_tokens=96,
        )
        for r in long_requests
    ]
