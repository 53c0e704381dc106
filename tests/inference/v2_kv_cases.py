"""Keys and values on vLLM's V2 runner. `test_v2_engines` runs this file; see `v2_engines`.

engine 0    V1
engine 1    V2, asynchronous, drafts from history
engine 2    V2, waits for each step
"""

import asyncio
from dataclasses import replace

import pytest
import pytest_asyncio
import safetensors.torch
import torch

from refrain.engines.histospec.index import build_index
from refrain.engines.histospec.index_file import index_path, write_index
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.inference.weights.canary import FLOAT32_TOLERANCE
from refrain.engines.learn.learner import Learner
from refrain.engines.rollout.interface import WeightSyncError
from refrain.schemas.rollout import RequestId, Rollout, RolloutRequest
from tests.inference.real import CONFIG, key, requests, weights_of
from tests.inference.switching import (
    BLOCK,
    Moved,
    assert_as_before,
    assert_most_differ,
    assert_moved,
    double_requests,
    files_of,
    generate,
    load,
    longest,
    move,
    zero_files,
)
from tests.inference.test_moved_kv import of_another_type
from tests.inference.v2_engines import (
    OFF,
    AsynchronousEngine,
    WaitingEngine,
    drafting_from,
    v1_engine,
    v2_engine,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="package")]


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def engines(ray_cluster, history_dir):
    assert ray_cluster.is_initialized()
    engines = [
        v1_engine(0, **OFF),
        v2_engine(1, AsynchronousEngine, **drafting_from(history_dir)),
        v2_engine(2, WaitingEngine, **OFF),
    ]
    await asyncio.gather(*(engine.start() for engine in engines))
    for engine, ahead in zip(engines[1:], (True, False), strict=True):
        assert await engine.actor.call_ranks.remote("is_asynchronous") == [ahead]
    yield engines
    await asyncio.gather(*(engine.shutdown() for engine in engines))


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def expected(engines, learner, prompts, history_dir) -> dict[RequestId, Rollout]:
    """The rollouts of engine 0, which become the history."""
    await load(engines, weights_of(learner, prompts))
    todo = double_requests(prompts)
    finished = await generate(engines[0], todo)
    for request in todo:
        one = request.id.prompt_key
        group = [r.generated.token_ids for id, r in finished.items() if id.prompt_key == one]
        index = build_index(request.prompt_token_ids, group, [0.0, 1.0, 0.5, 1.0])
        path = index_path(history_dir, one)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_index(index, one, path)
    return finished


@pytest.fixture
def todo(prompts, expected) -> list[RolloutRequest]:
    return longest(double_requests(prompts), expected)[::2]


async def bytes_loaded(engine: RayEngine) -> int:
    return (await engine.take_kv_counts()).num_bytes_loaded


@pytest.mark.parametrize(
    ("source", "target", "ahead"),
    [(0, 1, False), (1, 2, True), (2, 1, True), (1, 0, False)],
)
async def test_a_moved_request_goes_on(engines, weights, expected, todo, source, target, ahead):
    pair = [engines[source], engines[target]]
    await load(pair, weights)
    moved = await move(pair[:1], pair[1], todo, keep_kv=True, ahead=ahead)
    assert_as_before(moved.finished, expected)
    assert_moved(moved)
    assert await bytes_loaded(pair[1]) > 0
    if target == 1:
        drafted = [moved.finished[request.id].generated for request in moved.requests]
        assert sum(g.num_accepted_tokens for g in drafted) > 20


async def test_zeroed_keys_and_values_would_show(engines, weights, expected, todo):
    """Negative control: with zeroed keys and values, most tokens differ."""
    source, target = engines[2], engines[1]
    await load([source, target], weights)
    moved = await move(
        [source],
        target,
        todo,
        keep_kv=True,
        meanwhile=lambda left: zero_files(files_of(left)),
    )
    assert_moved(moved)
    assert_most_differ(moved, expected)


@pytest.mark.parametrize(("source", "target"), [(2, 1), (1, 2)])
async def test_requests_begin_anew_after_a_failed_load(
    engines, weights, expected, todo, source, target
):
    """The ranks notice the wrong files, after the requests have been scheduled."""
    pair = [engines[source], engines[target]]
    await load(pair, weights)
    await bytes_loaded(pair[1])
    moved = await move(pair[:1], pair[1], todo, keep_kv=True, meanwhile=of_another_type)
    assert_as_before(moved.finished, expected)
    assert await bytes_loaded(pair[1]) == 0


async def test_a_cached_prompt_begins_without_drafts(engines, weights, prompts):
    """If only one token of a prompt is not in the prefix cache, vLLM would add drafts."""
    many = tuple(token for prompt in prompts for token in prompt)[1:]
    (first, *_) = requests([many[: 2 * BLOCK + 1]])
    # No history is of this prompt.
    id = replace(first.id, prompt_key=key(len(prompts)))
    request = replace(first, id=id, max_response_tokens=24)
    await load(engines[:2], weights)
    alone = await generate(engines[0], [request])
    for num_cached in (0, 2 * BLOCK):
        again = await generate(engines[1], [request])
        assert_as_before(again, alone)
        assert again[id].num_cached_tokens == num_cached
        assert again[id].generated.num_draft_tokens == 0


async def test_asleep_and_awake(engines, weights, expected, todo):
    """A sleeping engine has zeroed its keys and values, and computes them again."""
    await load(engines[1:2], weights)
    assert_as_before(await generate(engines[1], todo), expected)
    assert await engines[1].actor.call_ranks.remote("has_kv") == [True]
    await engines[1].sleep()
    assert await engines[1].actor.call_ranks.remote("has_kv") == [False]
    assert not await engines[1].wake()
    await load(engines[1:2], weights)
    assert_as_before(await generate(engines[1], todo), expected)


async def test_new_weights_and_wrong_ones(engines, weights, expected, todo, prompts):
    engine = engines[1]
    changed = Learner(CONFIG)
    changed.restore(None)
    with torch.no_grad():
        for parameter in changed._policy.parameters():
            parameter.mul_(1.05)
    good = replace(weights_of(changed, prompts), policy_version=1)
    assert await engine.load_weights(good) < FLOAT32_TOLERANCE
    finished = await generate(engine, todo)
    assert_most_differ(Moved(todo, finished), expected)
    with pytest.raises(WeightSyncError, match=r"engine 1 after .* differs from the trainer"):
        await engine.load_weights(replace(good, policy_version=2, source=weights.source))
    tensors = safetensors.torch.load(good.source)
    without = {name: tensors[name] for name in tensors if "layers.1." not in name}
    partial = replace(good, policy_version=3, source=safetensors.torch.save(without))
    with pytest.raises(WeightSyncError, match=r"took no new weights for .*\.layers\.1\."):
        await engine.load_weights(partial)
    await load([engine], weights)
    assert_as_before(await generate(engine, todo), expected)
