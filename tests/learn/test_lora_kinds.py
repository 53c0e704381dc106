"""Adapters on every kind of layer reach engines, the export and peft, or the run is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from refrain.engines.learn.export import find_start_files, write_export
from refrain.engines.learn.loading import Loading, load_policy
from refrain.engines.learn.lora import adapter_tensors, merged_at_work, write_adapter
from refrain.engines.learn.packing import TokenSequence
from refrain.engines.learn.policy import PolicyModel, score_sequences
from refrain.engines.learn.precision import ComputeIn
from refrain.engines.learn.publishing import whole_tensors
from refrain.engines.learn.training_state import host_tensors
from refrain.schemas.trainer import LoraConfig
from tests.learn.conftest import own_logprobs
from tests.learn.test_attention import SMALL

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"tie_word_embeddings": False},  # It scales its embedding.
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2},  # Conv1D layers, some of them square.
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 48},
    "qwen3_moe": EXPERTS | {"num_experts": 4},
    "deepseek_v3": EXPERTS
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    | {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "num_key_value_heads": 4,
    }
    | {"qk_nope_head_dim": 16, "v_head_dim": 16},
}
ENDS = ("embed_tokens", "lm_head")
TIED = {"tie_word_embeddings": True}
EXPERT_WEIGHTS = 2 * 3
"""Number of weights of routers and experts, in both layers."""


def made(kind: str, path: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL | KINDS[kind] | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def moved(path: Path, lora: LoraConfig) -> PolicyModel:
    """Return a policy with random adapters, so that they change its output."""
    policy = load_policy(path, Loading(torch.device("cpu"), lora=lora))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    return policy


def scores(policy: PolicyModel) -> np.ndarray:
    return score_sequences(policy, [TokenSequence(np.array(IDS, np.int32), 1)], 64, 1.0)[0]


def by_transformers(model: PreTrainedModel) -> np.ndarray:
    return own_logprobs(model.eval(), IDS)


def read(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")


@pytest.mark.parametrize(
    ("kind", "targets", "num_changed"),
    [
        ("llama", (*ENDS, "q_proj"), 2 + 2),
        ("gemma3_text", ("embed_tokens",), 1),
        ("gpt2", "all-linear", 2 * 4),
        ("mixtral", "all-linear", 2 * 4 + EXPERT_WEIGHTS),
        ("mixtral", ("w1", "w2", "w3"), 2 * 2),
        ("qwen2_moe", "all-linear", 2 * (4 + 3 + 1)),
        ("qwen3_moe", "all-linear", 2 * 4 + EXPERT_WEIGHTS),
        ("qwen3_moe", ("down_proj", *ENDS), 2 + 2),
        ("deepseek_v3", "all-linear", 2 * 5 + 3),
    ],
)
def test_engines_the_export_and_peft_compute_what_the_trainer_does(
    tmp_path: Path, kind: str, targets: Any, num_changed: int
) -> None:
    start, lora = made(kind, tmp_path / "start"), LoraConfig(rank=4, target_modules=targets)
    policy = moved(start, lora)
    expected = scores(policy)
    before, sent = read(start), dict(whole_tensors(policy.model, torch.float32).tensors)
    weights = before.state_dict()
    assert dict(before.named_parameters()).keys() <= sent.keys() <= weights.keys()
    assert num_changed == sum(not torch.equal(sent[name], weights[name]) for name in sent)
    assert np.abs(by_transformers(before) - expected).max() > 0.05
    before.load_state_dict(sent, strict=False)
    np.testing.assert_allclose(by_transformers(before), expected, atol=2e-5)

    export = host_tensors(policy, torch.float32, keep=True)
    write_export(policy.model, export, find_start_files(start), tmp_path / "model")
    np.testing.assert_allclose(by_transformers(read(tmp_path / "model")), expected, atol=2e-5)
    write_adapter(adapter_tensors(policy.model), lora, start, tmp_path / "adapter")
    adapted: Any = peft.PeftModel.from_pretrained(read(start), tmp_path / "adapter")
    np.testing.assert_allclose(by_transformers(adapted), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "targets"), [("llama", (*ENDS, "q_proj")), ("qwen3_moe", "all-linear")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_canaries_are_of_the_merged_weights_in_either_data_type(
    tmp_path: Path, kind: str, targets: Any, dtype: torch.dtype
) -> None:
    """An engine holds merged weights and no adapters, so canaries must be computed with those."""
    start, lora = made(kind, tmp_path / "start"), LoraConfig(rank=4, target_modules=targets)
    policy = moved(start, lora)
    before = {name: one.clone() for name, one in policy.named_parameters()}
    expected = scores(policy)
    export = host_tensors(policy, dtype, keep=True)
    write_export(policy.model, export, find_start_files(start), tmp_path / "model")
    engine = scores(load_policy(tmp_path / "model", Loading(torch.device("cpu"), dtype=dtype)))
    with merged_at_work(policy.model), ComputeIn(dtype):
        found = scores(policy)
    np.testing.assert_allclose(found, engine, atol=1e-6)
    assert (np.abs(found - expected).max() > 1e-3) == (dtype is torch.bfloat16)
    torch.testing.assert_close(dict(policy.named_parameters()), before, atol=0.0, rtol=0.0)
    np.testing.assert_array_equal(scores(policy), expected)


@pytest.mark.parametrize(
    ("kind", "targets", "changes", "said"),
    [
        ("llama", ("embed_tokens",), TIED, "model.embed_tokens.weight is"),
        ("llama", ("lm_head",), TIED, "lm_head.weight is the embedding and"),
        ("llama", ("norm",), {}, "Target module LlamaRMSNorm"),
        ("qwen3_moe", ("gate_proj",), {}, "Cannot convert .* without"),
        ("qwen3_moe", ("experts",), {}, "Target module Qwen3MoeExperts"),
    ],
)
def test_a_layer_whose_adapter_cannot_be_merged_is_refused(
    tmp_path: Path, kind: str, targets: Any, changes: dict, said: str
) -> None:
    lora = LoraConfig(rank=4, target_modules=targets)
    with pytest.raises(ValueError, match=f"trainer.lora.target_modules: {said}"):
        moved(made(kind, tmp_path, **changes), lora)
