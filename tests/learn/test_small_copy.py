"""A small copy of a model keeps each feature, and the order of its lengths by size."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from refrain.engines.learn.small_copy import small_copy

KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({"num_hidden_layers": 80}, 2),
    "gemma3_text": ({"num_hidden_layers": 62}, 6),  # Five layers with a window, then one without.
    "deepseek_v3": ({"num_hidden_layers": 61}, 4),  # Three dense layers, then layers with experts.
    "qwen3_next": ({"num_hidden_layers": 48}, 4),
    "jamba": ({"num_hidden_layers": 32}, 5),
    "llama4_text": ({"num_hidden_layers": 48}, 4),
    "qwen2": ({"num_hidden_layers": 28, "use_sliding_window": True, "max_window_layers": 21}, 2),
}
"""By family: fields of the configuration, and number of layers that cover each kind of layer."""


@pytest.mark.parametrize("family", KINDS)
def test_each_kind_of_layer_is_kept(family: str) -> None:
    more, layers = KINDS[family]
    copy = small_copy(AutoConfig.for_model(family, **more), 2048)
    assert (copy.config.num_hidden_layers, copy.num_layers) == (layers, layers)
    model = AutoModelForCausalLM.from_config(copy.config)
    assert sum(one.numel() for one in model.parameters()) < 1_000_000
    model(input_ids=torch.arange(copy.max_tokens)[None] % copy.config.vocab_size, use_cache=False)
    if family == "qwen2":
        assert copy.config.layer_types == ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(("max_tokens", "beyond"), [(2048, False), (8192, True)])
def test_a_sample_passes_a_switch_of_rope_where_the_runs_does(
    max_tokens: int, beyond: bool
) -> None:
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    config = AutoConfig.for_model(
        "phi3",
        rope_parameters=rope,
        original_max_position_embeddings=4096,
        max_position_embeddings=131072,
        sliding_window=262144,
    )
    copy = small_copy(config, max_tokens)
    small = copy.config
    assert (copy.max_tokens > small.original_max_position_embeddings) == beyond
    assert copy.max_tokens > small.sliding_window
    assert copy.max_tokens < small.max_position_embeddings < 1000
    width = small.hidden_size // small.num_attention_heads
    assert len(small.rope_parameters["long_factor"]) == width // 2


def test_features_are_kept() -> None:
    features = {
        "attention_dropout": 0.25,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "hidden_act": "relu",
    }
    config = AutoConfig.for_model("llama", num_key_value_heads=1, **features)
    small = small_copy(config, 512).config
    assert {name: getattr(small, name) for name in features} == features
    assert small.num_key_value_heads == 1 < small.num_attention_heads
