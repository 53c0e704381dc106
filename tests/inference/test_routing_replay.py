"""Rollouts of a real engine bring the experts of their tokens, and with these the trainer computes
the engine's log-probabilities.

In float32, engine and trainer agree to 1e-5, so the trainer's routers tell which experts are right.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from refrain.engines.histospec.index import build_index
from refrain.engines.histospec.index_file import index_path, write_index
from refrain.engines.inference.engine.in_process import InProcessEngine
from refrain.engines.learn.learner import Learner
from refrain.engines.learn.packing import TokenSequence
from refrain.engines.learn.policy import score_sequences
from refrain.engines.learn.routing_replay import replayed_share
from refrain.engines.store.rows import rollout_rows
from refrain.schemas.config import EngineConfig, TrainConfig
from refrain.schemas.rollout import RequestId, Rollout, RolloutRequest
from refrain.schemas.weights import PolicyWeights
from tests.inference.real import key, requests, tokens_of
from tests.inference.test_experts import SHAPE, VOCAB_SIZE, config_of, weights_of

pytestmark = pytest.mark.engine

BYTES_PER_TOKEN = SHAPE["num_hidden_layers"] * SHAPE["num_experts_per_tok"]
SCARCE_KV_BYTES = 24 * 32 * 2 * 2 * 2 * 32 * 4
"""24 blocks of 32 tokens: keys and values of 2 layers with 2 heads of 32 floats. The requests of
the tests need several times as many, so vLLM preempts some."""


@pytest.fixture
def prompts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(3)
    return [tuple(rng.integers(3, VOCAB_SIZE, 40 + 7 * i).tolist()) for i in range(4)]


def replaying(config: TrainConfig, dtype: str) -> TrainConfig:
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"dtype": dtype}),
            "trainer": config.trainer.model_copy(update={"routing_replay": True}),
        }
    )


def started(config: TrainConfig) -> Learner:
    learner = Learner(config)
    learner.restore(None)
    return learner


@asynccontextmanager
async def engine_of(
    config: EngineConfig, weights: PolicyWeights
) -> AsyncGenerator[InProcessEngine]:
    engine = InProcessEngine(0, config)
    await asyncio.wait_for(engine.start(), 300.0)
    try:
        await engine.load_weights(weights)
        yield engine
    finally:
        await engine.shutdown()


def sequence(rollout: Rollout, experts: bytes) -> TokenSequence:
    prompt, response = rollout.request.prompt_token_ids, rollout.generated.token_ids
    return TokenSequence(np.array([*prompt, *response], np.int32), len(prompt), experts=experts)


def mismatch(learner: Learner, rollouts: Sequence[Rollout], experts: Sequence[bytes]) -> np.ndarray:
    """Return log pi_trainer - log pi_engine of each sampled token."""
    given = [sequence(one, own) for one, own in zip(rollouts, experts, strict=True)]
    scored = score_sequences(learner._policy, given, 384, 1.0)
    told = [np.array(one.generated.inference_logprobs) for one in rollouts]
    return np.concatenate(scored) - np.concatenate(told)


def assert_complete_and_right(learner: Learner, rollouts: Sequence[Rollout]) -> None:
    """In float32, the trainer's routers choose what the engine's chose, except in a rare tie."""
    experts = [rollout.generated.experts for rollout in rollouts]
    given = [sequence(one, own) for one, own in zip(rollouts, experts, strict=True)]
    replay = learner._policy.replay
    assert replay
    for one in given:
        assert len(one.experts) == one.num_input_tokens * BYTES_PER_TOKEN
    assert replayed_share(given, replay.shape) == 1.0
    differences = mismatch(learner, rollouts, experts)
    num_given, num_changed = replay.take_counts()
    assert num_given == SHAPE["num_hidden_layers"] * sum(one.num_input_tokens for one in given)
    assert num_changed <= 2
    assert np.abs(differences).max() < 1e-3


async def test_a_mixture_in_bfloat16_agrees_as_well_as_a_dense_model(
    prompts, tmp_path: Path
) -> None:
    config = replaying(config_of(tmp_path / "model"), "bfloat16")
    learner, todo = started(config), requests(prompts)
    weights = weights_of(learner)
    plain = config.engine.model_copy(update={"record_experts": False})
    async with engine_of(plain, weights) as engine:
        without = await engine.generate(todo)
    async with engine_of(config.engine, weights) as engine:
        rollouts = await engine.generate(todo)
    assert [one.generated.token_ids for one in rollouts] == [
        one.generated.token_ids for one in without
    ]
    assert [one.generated.inference_logprobs for one in rollouts] == [
        one.generated.inference_logprobs for one in without
    ]
    assert not any(one.generated.experts for one in without)

    experts = [one.generated.experts for one in rollouts]
    shifted = [own[BYTES_PER_TOKEN:] + own[:BYTES_PER_TOKEN] for own in experts]
    free = np.abs(mismatch(learner, rollouts, [b""] * len(rollouts)))
    replayed = np.abs(mismatch(learner, rollouts, experts))
    wrong = np.abs(mismatch(learner, rollouts, shifted))
    dense = np.abs(await dense_mismatch(config, prompts, tmp_path / "dense"))
    print(f"{'':20} mean       max   of {len(free)} tokens, |log pi_trainer - log pi_engine|")
    rows = {"free": free, "replayed": replayed, "another token's": wrong, "dense model": dense}
    for name, values in rows.items():
        print(f"{name:15} {values.mean():9.5f} {values.max():9.5f}")
    assert replayed.max() < 1.5 * dense.max()
    assert replayed.mean() < 1.5 * dense.mean()
    assert free.max() > 4.0 * replayed.max()
    assert wrong.mean() > 10.0 * free.mean()


async def dense_mismatch(
    config: TrainConfig, prompts: list[tuple[int, ...]], path: Path
) -> np.ndarray:
    """Return the mismatch of a dense model with as many parameters for a token."""
    path.mkdir()
    for file in config.model.path.glob("*token*"):
        (path / file.name).write_bytes(file.read_bytes())
    width = SHAPE["moe_intermediate_size"] * SHAPE["num_experts_per_tok"]
    no_experts = {name: value for name, value in SHAPE.items() if "expert" not in name}
    shape = no_experts | {"intermediate_size": width}
    shape.pop("moe_intermediate_size")
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **shape)).save_pretrained(path)
    model = config.model.model_copy(update={"path": path})
    trainer = config.trainer.model_copy(update={"routing_replay": False})
    config = config.model_copy(update={"model": model, "trainer": trainer})
    learner = started(config)
    async with engine_of(config.engine, weights_of(learner)) as engine:
        rollouts = await engine.generate(requests(prompts))
    return mismatch(learner, rollouts, [b""] * len(rollouts))


async def test_experts_are_complete_with_drafts_preemptions_and_moves(
    prompts, tmp_path: Path
) -> None:
    """Prompts come in chunks and from the prefix cache, and histories hold right and wrong
    drafts."""
    config, history = replaying(config_of(tmp_path / "model"), "float32"), tmp_path / "history"
    history.mkdir()
    learner, todo = started(config), requests(prompts)
    weights = weights_of(learner)
    async with engine_of(config.engine, weights) as engine:
        plain = await engine.generate(todo)
    assert_complete_and_right(learner, plain)
    for i, prompt in enumerate(prompts):
        own = [r.generated.token_ids for r in plain if r.id.prompt_key == key(i)]
        index = build_index(prompt, own[:2], [0.5, 1.0])
        write_index(index, key(i), index_path(history, key(i)))
    rollout = config.rollout.model_copy(
        update={
            "kv_cache_bytes": SCARCE_KV_BYTES,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 16,
        }
    )
    tight = config.model_copy(update={"rollout": rollout}).engine
    drafting = tight.model_copy(update={"history_dir": history, "pooled": True})
    other = config.engine.model_copy(update={"pooled": True})
    async with engine_of(drafting, weights) as one, engine_of(other, weights) as two:
        done = await moved(one, two, todo)
    assert sum(rollout.generated.num_accepted_tokens for rollout in done) > 100
    assert any(r.generated.num_draft_tokens > r.generated.num_accepted_tokens for r in done)
    finished = {rollout.id: rollout for rollout in done}
    assert tokens_of(finished) == tokens_of({rollout.id: rollout for rollout in plain})
    assert_complete_and_right(learner, done)
    (column,) = {rollout_rows(done)["experts"].type}
    assert str(column) == "large_binary"


async def moved(
    one: InProcessEngine, two: InProcessEngine, todo: list[RolloutRequest]
) -> list[Rollout]:
    """Generate on one engine, and move half of what is running to the other one: a part with keys
    and values, and a part without."""
    await one.submit(todo)
    going = await asyncio.wait_for(running(one), 60.0)
    leaving: list[RolloutRequest] = []
    for ids, keep_kv in ((going[::4], True), (going[1::4], False)):
        part = await one.withdraw(ids, keep_kv=keep_kv)
        assert all(request.generated and request.generated.experts for request in part)
        assert any(request.kv for request in part) == keep_kv
        leaving += part
    finished = await two.generate(leaving)
    await asyncio.wait_for(one._drained.wait(), 120.0)
    return finished + one._finished


async def running(engine: InProcessEngine) -> list[RequestId]:
    """Return requests of which the front end knows some tokens, as soon as there are four."""
    while len(known := [id for id, num in (await engine._num_tokens()).items() if num > 4]) < 4:
        assert engine._failure is None
        assert len(engine._finished) < 12, "too late to move requests"
        await asyncio.sleep(0.02)
    return known
