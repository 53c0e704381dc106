"""Shard of a model: one rank's share, so that one GPU can measure a TP degree. Pure.

    config.json ──heads, KV heads, inner size, vocabulary / t──► a model of its own
    seconds of a step + 2 D all-reduces of its tokens among t GPUs = seconds at TP t

D is the number of layers. The all-reduces follow the data sheet (`engines.latency.analytic`). Every
matrix has the shape that it has on a rank, so a step reads and computes as much as there. The
weights are random.

Deviations: the all-reduce of the input embedding and the gathering of logits are left out, and
tokens are drawn from a share of the vocabulary. If there are more ranks than KV heads, ranks hold
copies of a head, as in vLLM.
"""

from collections.abc import Mapping
from typing import Any

from refrain.engines.latency.analytic import AnalyticLatency
from refrain.engines.latency.hardware import HARDWARE
from refrain.engines.latency.model_shape import ModelShape
from refrain.schemas.latency import PointKind, ProfilePoint

DIVIDED = ("num_attention_heads", "intermediate_size", "moe_intermediate_size")
HEAD_SIZE_OF_ITS_OWN = ("llama", "mistral", "qwen3", "qwen3_moe", "gemma2")
"""Types of models whose head size is a setting, independent of the number of heads."""


def shard_config(config: Mapping[str, Any], tp_degree: int) -> dict[str, Any]:
    """Return the Hugging Face configuration of one of `tp_degree` shards. Raise ValueError if the
    shard would not be a valid model."""
    model_type = config.get("model_type")
    if model_type not in HEAD_SIZE_OF_ITS_OWN:
        known = ", ".join(HEAD_SIZE_OF_ITS_OWN)
        raise ValueError(f"shards of {model_type} models cannot be measured; supported: {known}")
    divided = {name: config[name] for name in DIVIDED if config.get(name)}
    if odd := [name for name, size in divided.items() if size % tp_degree]:
        raise ValueError(f"TP {tp_degree} does not divide {odd[0]} ({config[odd[0]]})")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if kv_heads % tp_degree and tp_degree % kv_heads:
        raise ValueError(f"TP {tp_degree} does not divide num_key_value_heads ({kv_heads})")
    return {
        **config,
        **{name: size // tp_degree for name, size in divided.items()},
        "num_key_value_heads": max(1, kv_heads // tp_degree),
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab_size": -(-config["vocab_size"] // tp_degree),
        # The end token may lie outside this share of the vocabulary, and no measurement ends by
        # itself.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def with_all_reduces(point: ProfilePoint, latency: AnalyticLatency) -> ProfilePoint:
    """Return a shard's measured point as the point of all ranks, with their all-reduces added.
    `latency`: of the whole model, on the GPUs whose links count. Draft points stay as they are."""
    if point.kind is PointKind.DRAFT:
        return point
    tokens_each = point.rms_tokens if point.kind is PointKind.PREFILL else point.window + 1
    more_s = latency.all_reduces_s(point.tp_degree, point.batch * tokens_each)
    return point.model_copy(update={"seconds": point.seconds + more_s})


def whole_latency(config: Mapping[str, Any], hardware_name: str) -> AnalyticLatency:
    """Return the latency model by data sheet of the model with this configuration. Raise ValueError
    if there is no such data sheet."""
    if hardware_name not in HARDWARE:
        known = ", ".join(sorted(HARDWARE))
        raise ValueError(f"shards: no data sheet of {hardware_name!r}; known: {known}")
    return AnalyticLatency(ModelShape.from_hf_config(config), HARDWARE[hardware_name])
