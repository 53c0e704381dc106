"""A mixture of experts on a real engine: the engine computes what the trainer computes, and drafts
change no token."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from refrain.engines.histospec.index import build_index
from refrain.engines.histospec.index_file import index_path, write_index
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.learn.learner import Learner
from refrain.engines.rollout.interface import WeightSyncError
from refrain.schemas.config import TrainConfig
from refrain.schemas.trainer import LoraConfig
from refrain.schemas.weights import PolicyWeights
from tests.conftest import DEMO
from tests.inference.real import key, requests, roll_out, tokens_of
from tests.inference.test_engine import drafts_of
from tests.learn.conftest import make_batch

pytestmark = pytest.mark.engine

VOCAB_SIZE = 64
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def config_of(model_dir: Path) -> TrainConfig:
    shutil.copytree(
        DEMO / "model", model_dir, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SHAPE))
    model.save_pretrained(model_dir)
    return TrainConfig.model_validate(
        {
            "model": {"path": model_dir, "dtype": "float32"},
            "data": {"train": ["unused"], "max_prompt_tokens": 128, "max_response_tokens": 256},
            "trainer": {"learning_rate": 1e-2, "micro_batch_tokens": 384},
        }
    )


def weights_of(learner: Learner) -> PolicyWeights:
    ids = np.random.default_rng(1).integers(2, VOCAB_SIZE, (4, 60)).tolist()
    canaries, long = learner.canaries(ids), learner.long_canaries(ids)
    return PolicyWeights(
        learner.policy_version, learner.weights_buffer(), canaries, long_canaries=long
    )


def with_adapters(config: TrainConfig) -> Learner:
    """Return a learner whose adapters changed experts, routers and attention in two steps."""
    trainer = config.trainer.model_copy(update={"lora": LoraConfig(rank=4)})
    learner = Learner(config.model_copy(update={"trainer": trainer}))
    learner.restore(None)
    for version in range(2):
        learner.train_step(make_batch(version, policy_version=version))
    return learner


def with_window(config: TrainConfig, model_dir: Path) -> TrainConfig:
    """Return the same configuration with an attention window of 128 tokens."""
    shutil.copytree(config.model.path, model_dir)
    file = model_dir / "config.json"
    changes = {"use_sliding_window": True, "sliding_window": 128}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": model_dir})})


async def test_experts_arrive_as_they_were_trained(ray_cluster, tmp_path: Path) -> None:
    """The canary allows 1e-3. Experts that are left unpacked would differ by a nat."""
    assert ray_cluster.is_initialized()
    config = config_of(tmp_path / "model")
    learner = Learner(config)
    learner.restore(None)
    engine = RayEngine(0, config.engine, num_gpus=0)
    await asyncio.wait_for(engine.start(), 300.0)
    try:
        weights = weights_of(learner)
        assert len(weights.long_canaries[0].token_ids) == config.max_model_len - 1
        assert await engine.load_weights(weights) < 1e-5
        before = learner.canaries([[5, 6, 7, 8]])[0].trainer_logprobs
        learner.train_step(make_batch())
        after = learner.canaries([[5, 6, 7, 8]])[0].trainer_logprobs
        assert np.abs(np.subtract(before, after)).max() > 0.05
        assert await engine.load_weights(weights_of(learner)) < 1e-5
        assert await engine.load_weights(weights_of(with_adapters(config))) < 1e-5
        # On the first 128 tokens, the window changes nothing: only the long canary shows it.
        windowed = Learner(with_window(config, tmp_path / "windowed"))
        windowed.restore(None)
        weights = weights_of(windowed)
        assert await engine.load_weights(replace(weights, long_canaries=())) < 1e-5
        with pytest.raises(WeightSyncError, match="over 382 tokens its log-probabilities"):
            await engine.load_weights(weights)
    finally:
        await engine.shutdown()


@pytest.mark.slow
async def test_drafts_change_no_token_of_a_mixture(ray_cluster, prompts, tmp_path: Path) -> None:
    """Each prompt's history is two of its four responses, so drafts are right and wrong."""
    assert ray_cluster.is_initialized()
    config, history_dir = config_of(tmp_path / "model"), tmp_path / "history"
    history_dir.mkdir()
    learner, few = Learner(config), prompts[:8]
    learner.restore(None)
    engine = RayEngine(0, config.engine.model_copy(update={"history_dir": history_dir}), num_gpus=0)
    await asyncio.wait_for(engine.start(), 300.0)
    try:
        weights, todo = weights_of(learner), [(0, request) for request in requests(few)]
        plain, _ = await roll_out([engine], weights, todo)
        assert drafts_of(plain) == (0, 0, 0)
        for i, prompt in enumerate(few):
            own = [r.generated.token_ids for r in plain.values() if r.id.prompt_key == key(i)]
            write_index(
                build_index(prompt, own[:2], [0.5, 1.0]), key(i), index_path(history_dir, key(i))
            )
        drafted, _ = await roll_out([engine], weights, todo)
        assert tokens_of(drafted) == tokens_of(plain)
        _, num_drafted, num_accepted = drafts_of(drafted)
        assert num_drafted > num_accepted > 300
    finally:
        await engine.shutdown()
