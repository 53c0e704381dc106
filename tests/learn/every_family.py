"""Tiny models of every family in transformers, with each optional feature switched on in turn.

transformers' causal models ─► defaults, made small ─► one field of the configuration changed at a
                                                       time: flags, windows, caps, scales,
                                                       dropouts, ropes, shared heads, ...
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from refrain.engines.learn.fidelity import check_fidelity
from refrain.engines.learn.loading import Loading, attention_of, prepared
from refrain.engines.learn.packing import TokenSequence
from refrain.engines.learn.policy import score_sequences
from refrain.engines.learn.sample_isolation import keeps_samples_apart
from refrain.engines.learn.small_copy import SmallCopy, small_copy

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MAX_TOKENS = 256
"""Longest sample that the small copies must take, in tokens."""
WINDOW, SWITCH = 24, 48
"""Size of a window that is switched on, and a rope's original context, both in tokens."""
RIGHT, REFUSED, IMPOSSIBLE = "right", "refused", "impossible"

WITHOUT_DEFAULT: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "layer_types": ["full_attention", "full_attention"],
}
"""Values for fields that some configurations leave empty though their models need them."""
SWITCHED_ON: tuple[tuple[str, Any], ...] = (
    (r"dropout|pdrop|layerdrop", 0.1),
    (r"jitter", 0.01),
    (r"soft_?cap", 2.0),
    (r"window", WINDOW),
    (r"clip_qkv", 0.5),
    (r"limit$", 0.5),
    (r"partial_rotary_factor", 0.5),
    (r"(multiplier|scale|scaling|scaling_factor|scalar|alpha|beta)$", 0.7),
    (r"q_lora_rank", 16),
    (r"shared_experts$", 1),
    (r"(first_k_dense_replace|num_dense_layers)$", 1),
    (r"hidden_act|activation_function|hidden_activation", "relu"),
    (r"attention_chunk_size|floor", WINDOW),
)
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": SWITCH},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": SWITCH,
    },
    "longrope": {
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0],
        "original_max_position_embeddings": SWITCH,
        "factor": 4.0,
    },
}


def tiny(family: str) -> SmallCopy | None:
    """Return the small copy of a family's defaults, or None if the defaults make no model."""
    for more in ({}, WITHOUT_DEFAULT):
        try:
            config = AutoConfig.for_model(family)
            text = config.get_text_config()
            empty = {k: v for k, v in more.items() if getattr(text, k, 0) is None}
            layers = {"num_hidden_layers": 2} if "layer_types" in empty else {}
            config = type(text).from_dict(text.to_dict() | empty | layers)
            copy = small_copy(config, MAX_TOKENS)
            _own_logprobs(_model(copy.config), copy.max_tokens)
            return copy
        except Exception:  # Each family reports a missing default with another exception.
            continue
    return None


def features(config: PretrainedConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a name and the changed fields of each feature that the configuration may have."""
    values, ours = config.to_dict(), set(PretrainedConfig().to_dict()) - {"tie_word_embeddings"}
    for name in sorted(values.keys() - ours):
        value = values[name]
        if isinstance(value, bool):
            if not name.startswith(("use_cache", "output_", "use_mamba_kernels")):
                yield f"{name}={not value}", {name: not value}
        elif isinstance(value, int | float | str | None):
            for pattern, switched in SWITCHED_ON:
                if re.search(pattern, name) and value != switched:
                    yield f"{name}={switched}", {name: switched}
                    break
    yield from _of_many_fields(values)


def _of_many_fields(values: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    heads, shared = values.get("num_attention_heads"), values.get("num_key_value_heads")
    for number in {1, heads} - {shared} if heads and shared else ():
        yield f"num_key_value_heads={number}", {"num_key_value_heads": number}
    kinds = values.get("layer_types")
    window = {key: WINDOW for key in ("sliding_window", "attention_chunk_size") if key in values}
    if kinds and window:
        for kind in ("sliding_attention", "chunked_attention"):
            types = [kind, *kinds[1:]] if len(kinds) > 1 else [kind]
            on = {"use_sliding_window": True} if "use_sliding_window" in values else {}
            yield f"layer_types={kind}", {"layer_types": types, **window, **on}
    if "use_sliding_window" in values:
        on = {"use_sliding_window": True, "max_window_layers": 0, **window}
        yield "use_sliding_window, all layers", {**on, "layer_types": None}
    rope = values.get("rope_parameters")
    if rope and not any(isinstance(value, dict) for value in rope.values()):
        width = {"head_dim": 16} if values.get("head_dim", 16) is None else {}
        for kind, given in ROPES.items():
            changed = {"rope_parameters": {**rope, "rope_type": kind, **given}, **width}
            yield f"rope_type={kind}", changed
            if kind == "dynamic":
                yield "dynamic, beyond its context", {**changed, "max_position_embeddings": SWITCH}


def verdict(copy: SmallCopy, changed: Mapping[str, Any]) -> tuple[str, str]:
    """Return RIGHT, REFUSED or IMPOSSIBLE, and why. RIGHT: the trainer computes this model as
    transformers does. REFUSED: `--check` would refuse it. Raise AssertionError if the trainer is
    wrong and `--check` accepts the model."""
    longest = copy.max_tokens
    try:
        made = type(copy.config).from_dict(copy.config.to_dict() | dict(changed))
        model = _model(made)
        own, filled = _own_logprobs(model, longest), _own_logprobs(model, longest, filled=True)
        causal = _most(own, filled) <= 1e-4
    except Exception as error:  # Each family refuses a value with another exception.
        return IMPOSSIBLE, str(error)
    try:
        worst, why = _largest(model, made, own, longest), ""
    except Exception as error:  # A model may fail in any way on the trainer's packed rows.
        worst, why = float("inf"), str(error)
    if causal and worst <= 1e-4:
        return RIGHT, f"{worst:.1g}"
    try:
        check_fidelity(made, longest)
    except Exception as error:  # `check_against_transformers` turns any of these into a ValueError.
        return REFUSED, str(error)
    raise AssertionError(
        f"{made.model_type} {dict(changed)}: wrong by {worst:.2g}, accepted. {why}"
    )


def _model(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        type(config).from_dict(config.to_dict()), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            else:
                parameter.normal_(0, 0.15)
    return model.eval()


def _samples(longest: int) -> list[np.ndarray]:
    rng, lengths = np.random.default_rng(5), (longest, longest * 2 // 3, 40, 8)
    return [rng.integers(64, size=length + 1).astype(np.int32) for length in lengths]


@torch.no_grad()
def _own_logprobs(model: Any, longest: int, *, filled: bool = False) -> list[np.ndarray]:
    """Return log-probabilities of each sample, run alone. `filled`: pad it to the longest sample.
    A LongRoPE chooses its factors by the length of the row, so pad it always."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    filled = filled or "longrope" in str(rope.get("rope_type"))
    own = []
    for ids in _samples(longest):
        row = torch.zeros(1, longest if filled else len(ids) - 1, dtype=torch.long)
        row[0, : len(ids) - 1] = torch.from_numpy(ids[:-1])
        logprobs = model(input_ids=row, use_cache=False).logits[0].float().log_softmax(-1)
        own.append(logprobs[range(len(ids) - 1), ids[1:]].numpy())
    return own


def _largest(model: Any, config: PretrainedConfig, own: list[np.ndarray], longest: int) -> float:
    copied = AutoModelForCausalLM.from_config(
        type(config).from_dict(config.to_dict()),
        dtype=torch.float32,
        attn_implementation=attention_of(config),
    )
    copied.load_state_dict(model.state_dict())
    policy = prepared(copied, Loading(torch.device("cpu"), max_tokens=longest))
    policy.alone = not keeps_samples_apart(policy, torch.float32)
    sequences = [TokenSequence(ids, 1) for ids in _samples(longest)]
    scored = score_sequences(policy, sequences, 3 * longest, 1.0)
    return _most(own, scored)


def _most(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
