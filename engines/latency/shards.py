"""One rank's share of a model, which one GPU can be measured with, and what the ranks' all-reduces
add to it. Pure.

    config.json ──heads, KV heads, inner size, vocabulary / t──► a model of its own
    seconds of a step + 2 D all-reduces of its tokens among t GPUs = seconds at TP t

with D layers and all-reduces by data sheet (`engines.latency.analytic`). Every matrix has the shape
that it has on a rank, so a step reads and computes what it does there; weights are random.

Deviations: the all-reduce of the input embedding and the gathering of logits are left out; tokens
are drawn from a share of the vocabulary. Ranks that have a KV head in common have it each, as in
vLLM.
"""

from collections.abc import Mapping
from typing import Any

from engines.latency.analytic import AnalyticLatency
from engines.latency.hardware import HARDWARE
from engines.latency.model_shape import ModelShape
from schemas.latency import PointKind, ProfilePoint

DIVIDED = ("num_attention_heads", "intermediate_size", "moe_intermediate_size")
HEAD_SIZE_OF_ITS_OWN = ("llama", "mistral", "qwen3", "qwen3_moe", "gemma2")
"""Types of models whose size of a head need not follow from the number of heads."""


def shard_config(config: Mapping[str, Any], tp_degree: int) -> dict[str, Any]:
    """Hugging Face configuration of the share of one of `tp_degree` ranks. Raises ValueError where
    there is none that is a model too."""
    model_type = config.get("model_type")
    if model_type not in HEAD_SIZE_OF_ITS_OWN:
        known = ", ".join(HEAD_SIZE_OF_ITS_OWN)
        raise ValueError(f"a shard of {model_type} is no model of its own; of these it is: {known}")
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
        # Ends of responses may not be in this share; nothing that is measured ends by itself.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def with_all_reduces(point: ProfilePoint, latency: AnalyticLatency) -> ProfilePoint:
    """The point that a shard measured, as of all ranks of its TP degree. `latency`: of the whole
    model, on the GPUs whose links count. Drafting has no all-reduce."""
    if point.kind is PointKind.DRAFT:
        return point
    tokens_each = point.rms_tokens if point.kind is PointKind.PREFILL else point.window + 1
    more_s = latency.all_reduces_s(point.tp_degree, point.batch * tokens_each)
    return point.model_copy(update={"seconds": point.seconds + more_s})


def whole_latency(config: Mapping[str, Any], hardware_name: str) -> AnalyticLatency:
    """Latency by data sheet of the model with this configuration. Raises ValueError."""
    if hardware_name not in HARDWARE:
        known = ", ".join(sorted(HARDWARE))
        raise ValueError(f"shards: no data sheet of {hardware_name!r}; known: {known}")
    return AnalyticLatency(ModelShape.from_hf_config(config), HARDWARE[hardware_name])
