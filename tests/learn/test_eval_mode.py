"""Policies compute without random noise, and gradient checkpointing still recomputes layers."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from engines.learn.attention import PACKED
from engines.learn.loading import Loading, prepared
from engines.learn.packing import TokenSequence, pack
from engines.learn.policy import PolicyModel, score_sequences
from tests.learn.test_attention import SMALL

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
NOISY: dict[str, dict[str, Any]] = {
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1},
    "seed_oss": {"residual_dropout": 0.1},
    "opt": {"dropout": 0.1, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "mixtral": MOE | {"router_jitter_noise": 0.01},
    "phimoe": MOE | {"router_jitter_noise": 0.01, "input_jitter_noise": 0.01},
}
IDS = np.random.default_rng(0).integers(1, 64, 120).astype(np.int32)


def policy_of(kind: str, *, gradient_checkpointing: bool = False) -> PolicyModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL | NOISY[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED)
    loading = Loading(torch.device("cpu"), gradient_checkpointing=gradient_checkpointing)
    return prepared(model, loading)


@pytest.mark.parametrize("kind", NOISY)
def test_scoring_twice_gives_the_same(kind: str) -> None:
    policy = policy_of(kind)
    first, second = (score_sequences(policy, [TokenSequence(IDS, 1)], 256, 1.0) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def layer_modes(policy: PolicyModel) -> list[bool]:
    """Return a list that records, at each forward of a layer, whether it is in training mode."""
    modes: list[bool] = []
    for layer in policy.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    return modes


@pytest.mark.parametrize("kind", ["opt", "mixtral"])
def test_layers_are_computed_again_for_gradients(kind: str) -> None:
    (batch,) = pack([TokenSequence(IDS, 1)], 256)
    found = []
    for checkpointing in (False, True):
        policy = policy_of(kind, gradient_checkpointing=checkpointing)
        modes = layer_modes(policy)
        policy.score(batch, 1.0).logprobs.sum().backward()
        # No layer runs in training mode. With checkpointing, each runs twice.
        assert modes == [False] * SMALL["num_hidden_layers"] * (2 if checkpointing else 1)
        found.append([one.grad for one in policy.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)
