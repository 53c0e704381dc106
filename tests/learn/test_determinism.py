"""Policies compute without random noise. `check_steady` refuses models that draw it, keep state
between calls, or have a rope that depends on the whole row."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from refrain.engines.learn.attention import PACKED
from refrain.engines.learn.determinism import check_steady
from refrain.engines.learn.loading import Loading, prepared
from refrain.engines.learn.packing import TokenSequence, pack
from refrain.engines.learn.policy import PolicyModel
from tests.learn.test_attention import FEATURES, SHAPES, SMALL
from tests.learn.test_rope import ROPES
from tests.learn.test_sample_isolation import HYBRIDS

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
NOISY: dict[str, dict[str, Any]] = {
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1},
    "seed_oss": {"residual_dropout": 0.1},
    "opt": {"dropout": 0.1, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "mixtral": MOE | {"router_jitter_noise": 0.01},
    "phimoe": MOE | {"router_jitter_noise": 0.01, "input_jitter_noise": 0.01},
}
KINDS = SHAPES | FEATURES | HYBRIDS | NOISY


def policy_of(kind: str, checkpointing: bool = False, **more: object) -> PolicyModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL | KINDS[kind] | more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED)
    loading = Loading(torch.device("cpu"), gradient_checkpointing=checkpointing)
    policy = prepared(model, loading)
    policy.alone = kind in HYBRIDS
    return policy


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_are_trained_are_steady(kind: str) -> None:
    check_steady(policy_of(kind), torch.float32)


@pytest.mark.parametrize("kind", ROPES)
def test_ropes_are_fixed(kind: str) -> None:
    more = {"rope_parameters": ROPES[kind], "original_max_position_embeddings": 64}
    check_steady(policy_of(kind, **more), torch.float32)


@pytest.mark.parametrize("kind", ROPES)
def test_ropes_as_transformers_has_them_are_refused(kind: str) -> None:
    more = {"rope_parameters": ROPES[kind], "original_max_position_embeddings": 64}
    config = AutoConfig.for_model(kind, **SMALL | KINDS[kind] | more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED)
    with pytest.raises(ValueError, match=r"inv_freq of .* changes|when another in its row"):
        check_steady(PolicyModel(model.eval()), torch.float32)


class Norm(nn.Module):
    """A norm layer that computes `change` instead."""

    def __init__(self, change: Callable[["Norm", Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.mean = nn.Buffer(torch.zeros(()))
        self.num_seen = 0

    def forward(self, hidden: Tensor) -> Tensor:
        return self.change(self, hidden)


def dropout(_: Norm, hidden: Tensor) -> Tensor:
    return F.dropout(hidden, 0.1)


def moving_mean(norm: Norm, hidden: Tensor) -> Tensor:
    norm.mean = norm.mean * 0.9 + hidden.mean() * 0.1
    return hidden - norm.mean


def longest(norm: Norm, hidden: Tensor) -> Tensor:
    norm.num_seen = max(norm.num_seen, hidden.shape[-2])
    return hidden / norm.num_seen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dropout, r"layers.1.input_layernorm of LlamaForCausalLM draws random numbers"),
        (moving_mean, r"layers.1.input_layernorm.mean of LlamaForCausalLM changes when the model"),
        (longest, r"layers.1.input_layernorm.num_seen of LlamaForCausalLM changes when"),
    ],
)
def test_noise_and_memory_are_named(change: Any, message: str) -> None:
    policy = policy_of("llama")
    layers: Any = policy.get_submodule("model.model.layers")
    layers[1].input_layernorm = Norm(change)
    with pytest.raises(ValueError, match=message):
        check_steady(policy, torch.float32)


def test_rope_that_depends_on_the_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of("llama")
    rope: Any = policy.get_submodule("model.model.rotary_emb")
    turn = rope.forward
    monkeypatch.setattr(
        rope, "forward", lambda x, position_ids: turn(x, position_ids / (1 + position_ids.max()))
    )
    with pytest.raises(
        ValueError, match="LlamaForCausalLM computes a sample otherwise when another"
    ):
        check_steady(policy, torch.float32)


def layer_modes(policy: PolicyModel) -> list[bool]:
    """Return a list that records, at each forward of a layer, whether it is in training mode."""
    modes: list[bool] = []
    for layer in policy.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    return modes


@pytest.mark.parametrize("kind", ["opt", "mixtral"])
def test_layers_are_computed_again_for_gradients(kind: str) -> None:
    ids = np.random.default_rng(0).integers(1, 64, 120).astype(np.int32)
    (batch,) = pack([TokenSequence(ids, 1)], 256)
    found = []
    for checkpointing in (False, True):
        policy = policy_of(kind, checkpointing)
        modes = layer_modes(policy)
        policy.score(batch, 1.0).logprobs.sum().backward()
        # No layer runs in training mode. With checkpointing, each runs twice.
        assert modes == [False] * SMALL["num_hidden_layers"] * (2 if checkpointing else 1)
        found.append([one.grad for one in policy.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)
