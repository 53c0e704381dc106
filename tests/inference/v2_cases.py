"""Cases of `test_v2`, for a process in which vLLM's V2 runner works (`interpreted_env`)."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from refrain.engines.data.dataset import load_dataset, load_tokenizer
from refrain.engines.histospec.index import build_index
from refrain.engines.histospec.index_file import index_path, write_index
from refrain.engines.inference.engine.in_process import InProcessEngine
from refrain.engines.inference.engine.worker import WorkerExtension
from refrain.engines.learn.learner import Learner
from refrain.schemas.drafting import DraftingConfig, SpecActorConfig
from refrain.schemas.rollout import Rollout
from tests.inference.heads import memoryless, random_head, right_head
from tests.inference.real import CONFIG, key, requests, weights_of

REFERENCE = "REFRAIN_REFERENCE"
"""Environment variable with a file of the expected rollouts."""
NUM_PROMPTS = 3
pytestmark = [
    pytest.mark.skipif(REFERENCE not in os.environ, reason="run by test_v2"),
    pytest.mark.asyncio(loop_scope="module"),
]
DRAFTED = DraftingConfig(gate=False, shared_tokens=0, max_draft=6)


class KeyedWorker(WorkerExtension):
    """Worker whose sample keys a test can change."""

    def change_keys(self, by: int) -> None:
        from refrain.engines.inference.sampling import samplers_v2
        from refrain.engines.inference.sampling.drawing import key_of

        samplers_v2.key_of = lambda params: key_of(params) + by  # ty: ignore[invalid-assignment]


class V2Engine(InProcessEngine):
    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        extension = f"{KeyedWorker.__module__}.KeyedWorker"
        return super()._engine_args(on_cpu) | {"worker_extension_cls": extension}


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    dataset = load_dataset(CONFIG.data.train, load_tokenizer(CONFIG.model.path), 128)
    return [prompt.token_ids for prompt in dataset.prompts[:NUM_PROMPTS]]


@pytest.fixture(scope="module")
def history_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("history")


@pytest.fixture(scope="module")
def reference() -> list[dict[str, Any]]:
    return json.loads(Path(os.environ[REFERENCE]).read_text())


@pytest.fixture(scope="module")
def weights(prompts):
    learner = Learner(CONFIG)
    learner.restore(None)
    return weights_of(learner, prompts)


async def started(
    history_dir: Path, weights: Any, head: Path | None = None, **changes: Any
) -> V2Engine:
    rollout = CONFIG.engine.rollout.model_copy(update={"model_runner": "v2"} | changes)
    engine = V2Engine(
        0,
        CONFIG.engine.model_copy(
            update={
                "drafting": DRAFTED,
                "specactor": SpecActorConfig(head=head),
                "rollout": rollout,
                "history_dir": history_dir,
            }
        ),
    )
    await engine.start()
    await engine.load_weights(weights)
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(history_dir, weights):
    engine = await started(history_dir, weights)
    yield engine
    await engine.shutdown()


@pytest.fixture
def write_history(history_dir, prompts) -> Callable[[Sequence[Sequence[int]]], None]:
    """Return a function that makes these responses the history of their prompts."""

    def write(responses: Sequence[Sequence[int]]) -> None:
        for i, prompt in enumerate(prompts):
            group = [list(response) for response in responses[4 * i : 4 * i + 4]]
            path = index_path(history_dir, key(i))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_index(build_index(prompt, group, [0.0, 1.0, 0.5, 1.0]), key(i), path)

    return write


def check(rollouts: Sequence[Rollout], reference: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Assert that they are the expected ones. Return the drafted and the accepted tokens."""
    assert len(rollouts) == len(reference)
    for rollout, expected in zip(rollouts, reference, strict=True):
        assert list(rollout.generated.token_ids) == expected["tokens"]
        assert rollout.finish_reason == expected["reason"]
        assert rollout.generated.inference_logprobs == pytest.approx(expected["logprobs"], abs=1e-4)
    generated = [rollout.generated for rollout in rollouts]
    return sum(g.num_draft_tokens for g in generated), sum(g.num_accepted_tokens for g in generated)


async def test_without_drafts(engine, prompts, reference):
    assert check(await engine.generate(requests(prompts)), reference) == (0, 0)


async def test_drafts_that_are_right(engine, prompts, reference, write_history):
    write_history([one["tokens"] for one in reference])
    drafted, accepted = check(await engine.generate(requests(prompts)), reference)
    num_tokens = sum(len(one["tokens"]) for one in reference)
    assert accepted > num_tokens / 2
    counts = await engine.take_drafting_counts()
    assert counts.num_with_index == len(reference)
    assert counts.num_drafting_steps > 4
    assert accepted > 0.7 * drafted


async def test_drafts_of_another_epoch(engine, prompts, reference, write_history):
    """Some are right."""
    earlier = await engine.generate(requests(prompts, seed=1))
    write_history([rollout.generated.token_ids for rollout in earlier])
    drafted, accepted = check(await engine.generate(requests(prompts)), reference)
    assert 0.1 * drafted < accepted < 0.8 * drafted


async def test_drafts_that_are_wrong(engine, prompts, reference, write_history):
    write_history([[token + 1 for token in one["tokens"]] for one in reference])
    drafted, accepted = check(await engine.generate(requests(prompts)), reference)
    assert drafted > 20
    assert accepted < 0.3 * drafted


async def test_preempted_requests_continue(history_dir, weights, prompts, reference, write_history):
    """The KV cache has room for few of the requests at their full length."""
    write_history([one["tokens"] for one in reference])
    model = json.loads((CONFIG.model.path / "config.json").read_text())
    token_bytes = 2 * 4 * model["num_hidden_layers"] * model["num_key_value_heads"]
    token_bytes *= model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    engine = await started(history_dir, weights, kv_cache_bytes=32 * 16 * token_bytes)
    try:
        drafted, accepted = check(await engine.generate(requests(prompts)), reference)
        assert drafted >= accepted > 0
    finally:
        await engine.shutdown()


async def test_heads_change_no_token(weights, prompts, reference, write_history, history_dir):
    """One that is sure of wrong tokens, alone and beside a history that is right."""
    shutil.rmtree(history_dir, ignore_errors=True)
    engine = await started(history_dir, weights, random_head(history_dir / "head"))
    try:
        shares = []
        for has_history in (False, True):
            if has_history:
                write_history([one["tokens"] for one in reference])
            drafted, accepted = check(await engine.generate(requests(prompts)), reference)
            assert drafted > 100
            shares.append(accepted / drafted)
        assert shares[0] < 0.3
        assert shares[1] > 0.5
    finally:
        await engine.shutdown()


async def test_a_right_head_follows_its_policy(weights, prompts, tmp_path: Path):
    """The second weights have other embeddings than the first and than the model's directory."""
    learner, scale = memoryless(7, 3.0)
    others = weights_of(learner, prompts)
    todo = [replace(one, max_response_tokens=64) for one in requests(prompts)]
    found = []
    for head in (None, right_head(tmp_path / "head", scale)):
        engine = await started(tmp_path, weights, head)
        try:
            await engine.load_weights(others)
            found.append([rollout.generated for rollout in await engine.generate(todo)])
        finally:
            await engine.shutdown()
    tokens, expected = ([list(one.token_ids) for one in own] for own in reversed(found))
    assert tokens == expected
    drafted, accepted = (
        sum(getattr(one, name) for one in found[1])
        for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    assert accepted > 0.6 * drafted > 60


async def test_another_noise_would_be_noticed(engine, prompts, reference):
    """Negative control: with other sample keys, other tokens are drawn."""
    await engine._llm.collective_rpc("change_keys", args=(1,))
    with pytest.raises(AssertionError):
        check(await engine.generate(requests(prompts)), reference)
    await engine._llm.collective_rpc("change_keys", args=(0,))
    check(await engine.generate(requests(prompts)), reference)
