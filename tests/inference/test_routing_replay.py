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

from refrain.engines.inference.engine.in_process import InProcessEngine
from refrain.engines.learn.learner import Learner
from refrain.engines.learn.packing import TokenSequence
from refrain.engines.learn.policy import score_sequences
from refrain.engines.learn.routing_replay import replayed_share
from refrain.engines.store.rows import rollout_rows
from refrain.schemas.config import EngineConfig, TrainConfig
from refrain.schemas.rollout import Rollout
from refrain.schemas.weights import PolicyWeights
from tests.inference.real import requests
from tests.inference.test_experts import SHAPE, VOCAB_SIZE, config_of, weights_of

pytestmark = pytest.mark.engine

BYTES_PER_TOKEN = SHAPE["num_hidden_layers"] * SHAPE["num_experts_per_tok"]


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


async def test_experts_are_complete_and_right(prompts, tmp_path: Path) -> None:
    """The samples of a prompt share its blocks in the prefix cache."""
    config = replaying(config_of(tmp_path / "model"), "float32")
    learner = started(config)
    async with engine_of(config.engine, weights_of(learner)) as engine:
        rollouts = await engine.generate(requests(prompts))
    assert_complete_and_right(learner, rollouts)
    assert str(rollout_rows(rollouts)["experts"].type) == "large_binary"
