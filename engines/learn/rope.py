"""Rotary position embeddings computed by one rule for all samples: the engines' rule.

transformers chooses by the longest position in a row, so a sample's values would depend on its
neighbours. vLLM 0.32 decides once, in `vllm/model_executor/layers/rotary_embedding`:

    longrope    long factors for all samples if max_model_len is beyond the original length, short
                factors otherwise (`phi3_long_rope_scaled_rope.py`)
    dynamic     no scaling up to max_position_embeddings, and no positions beyond
                (`dynamic_ntk_scaling_rope.py`, `dynamic_ntk_alpha_rope.py`)
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE, DYNAMIC = "longrope", "dynamic"


def ropes_of(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield the parameters of a model's ropes: one rope for all layers, or one for each kind of
    layer."""
    given = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [rope for rope in given.values() if isinstance(rope, dict)]
    yield from nested or ([given] if given else [])


def most_positions(config: PretrainedConfig) -> int | None:
    """Return the most tokens of a sample that engines have positions for; None if no rope limits
    them."""
    dynamic = any(DYNAMIC in rope.get("rope_type", "") for rope in ropes_of(config))
    return config.get_text_config().max_position_embeddings if dynamic else None


def fix_ropes(model: PreTrainedModel, max_tokens: int | None) -> None:
    """Make a model use the same factors for all samples. `max_tokens`: the engines'
    `max_model_len`; None: all tokens that the model takes.

    Raises ValueError when engines have fewer positions than that.
    """
    text = model.config.get_text_config()
    limit = most_positions(text)
    if limit is not None and max_tokens is not None and max_tokens > limit:
        raise ValueError(beyond(max_tokens, limit))
    if max_tokens is None:
        max_tokens = getattr(text, "max_position_embeddings", 0)
    if getattr(text, "rope_parameters", None):
        text.rope_parameters = deepcopy(text.rope_parameters)  # Another config may share them.
    for rope in ropes_of(text):
        if rope.get("rope_type") == LONGROPE:
            original = rope["original_max_position_embeddings"]
            _take_one(rope, "long" if max_tokens > original else "short")
    for module in model.modules():
        for layer_type, kind in _kinds(module):
            if kind == LONGROPE:
                _compute_again(module, layer_type)


def beyond(num_tokens: int, limit: int) -> str:
    """Return the message for a sample that is too long."""
    return (
        f"a sample of {num_tokens} tokens is longer than the {limit} positions "
        "(max_position_embeddings) that engines have with a rope of type dynamic: lower "
        "data.max_prompt_tokens or data.max_response_tokens"
    )


def _take_one(rope: dict[str, Any], taken: str) -> None:
    """Use the factors of `taken` samples ("short" or "long") for all samples."""
    for name in ("factor", "mscale"):
        if f"{taken}_{name}" in rope:
            rope[f"short_{name}"] = rope[f"long_{name}"] = rope[f"{taken}_{name}"]


def _kinds(module: nn.Module) -> Iterator[tuple[str | None, str]]:
    """Yield the types of a module's ropes, with the kind of layer that each is for."""
    given = getattr(module, "rope_type", None)
    if isinstance(given, Mapping):
        yield from given.items()
    elif given is not None:
        yield None, given


@torch.no_grad()
def _compute_again(module: Any, layer_type: str | None) -> None:
    """Compute the frequencies again from the changed parameters. Buffers on the meta device come
    later."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    for name in ("inv_freq", "original_inv_freq"):
        buffer = getattr(module, prefix + name)
        if not buffer.is_meta:
            values, _ = ROPE_INIT_FUNCTIONS[LONGROPE](
                module.config, buffer.device, layer_type=layer_type
            )
            buffer.copy_(values)
