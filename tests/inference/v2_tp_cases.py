"""Two ranks on vLLM's V2 runner. `test_v2_engines` runs this file; see `v2_engines`."""

from dataclasses import replace
from pathlib import Path

import pytest

from refrain.engines.histospec.index import build_index
from refrain.engines.histospec.index_file import index_path, write_index
from refrain.schemas.drafting import SpecActorConfig
from tests.inference.heads import random_head
from tests.inference.real import key, requests
from tests.inference.switching import assert_as_before, generate, load
from tests.inference.v2_engines import OFF, AsynchronousEngine, drafting_from, v1_engine, v2_engine

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_two_ranks_draw_the_tokens_of_one(ray_cluster, weights, prompts, tmp_path: Path):
    """Both verify the same drafts, even if one is late. A head drafts beside the history."""
    assert ray_cluster.is_initialized()
    todo = [replace(r, max_response_tokens=64) for r in requests(prompts[:2])]
    headed = {"specactor": SpecActorConfig(head=random_head(tmp_path / "head"))}
    drafting = drafting_from(tmp_path) | headed
    one, two = v1_engine(0, **OFF), v2_engine(1, AsynchronousEngine, 2, **drafting)
    await one.start()
    await load([one], weights)
    expected = await generate(one, todo)
    await one.shutdown()
    for i, prompt in enumerate(prompts[:2]):
        group = [r.generated.token_ids for r in expected.values() if r.id.prompt_key == key(i)]
        path = index_path(tmp_path, key(i))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_index(build_index(prompt, group, [0.0, 1.0, 0.5, 1.0]), key(i), path)
    await two.start()
    await load([two], weights)
    assert await two.actor.call_ranks.remote("is_asynchronous") == [True, True]
    await two.actor.call_ranks.remote("record_drafts", 0.01)
    finished = await generate(two, todo)
    assert_as_before(finished, expected)
    assert sum(r.generated.num_accepted_tokens for r in finished.values()) > 100
    first, second = await two.actor.call_ranks.remote("recorded_drafts")
    assert first == second
    assert len(set(first)) > 5
    await two.shutdown()
