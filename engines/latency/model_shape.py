"""Sizes of a decoder-only transformer, as far as they decide its speed."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import PositiveInt

from schemas.base import Frozen

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MOE_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


class ModelShape(Frozen):
    """A dense model with grouped-query attention and a gated MLP."""

    name: str
    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    tied_embeddings: bool = False
    """Input and output embedding are one matrix."""
    element_bytes: PositiveInt = 2
    """Bytes of one weight, activation or KV entry."""

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], name: str = "") -> "ModelShape":
        """Shape that a Hugging Face `config.json` tells, from its contents."""
        required = ("num_hidden_layers", "hidden_size", "num_attention_heads")
        required += ("intermediate_size", "vocab_size")
        if missing := [field for field in required if config.get(field) is None]:
            raise ValueError(f"the model's configuration lacks {', '.join(missing)}")
        if experts := [field for field in MOE_FIELDS if config.get(field)]:
            raise ValueError(f"mixtures of experts are not modelled ({experts[0]} is set)")
        heads = config["num_attention_heads"]
        dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown data type {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        return cls(
            name=name or config.get("_name_or_path") or config.get("model_type") or "unnamed",
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tied_embeddings=config.get("tie_word_embeddings", False),
            element_bytes=DTYPE_BYTES[dtype],
        )

    @cached_property
    def layer_params(self) -> int:
        """Parameters of all layers: Q, K, V, O and three matrices of the MLP; norms left out."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @cached_property
    def head_params(self) -> int:
        """Parameters of the output projection; the input embedding has as many."""
        return self.hidden_size * self.vocab_size

    @property
    def num_params(self) -> int:
        return self.layer_params + self.head_params * (1 if self.tied_embeddings else 2)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.num_params * self.element_bytes

    @cached_property
    def step_bytes(self) -> int:
        """Bytes of weights that one step reads: the input embedding is looked up, not read."""
        return (self.layer_params + self.head_params) * self.element_bytes

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes


def _dense(name: str, layers: int, hidden: int, heads: int, inner: int, **more: Any) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        intermediate_size=inner,
        **{"num_kv_heads": 8, "head_dim": 128, "vocab_size": 151_936} | more,
    )


_SMALL = {"num_kv_heads": 2, "tied_embeddings": True}
SHAPES = {
    shape.name: shape
    for shape in (
        # PAT 5.1
        _dense("LLaMA3.1-8B", 32, 4096, 32, 14_336, vocab_size=128_256),
        _dense("Qwen3-14B", 40, 5120, 40, 17_408),
        # RhymeRL, table 3
        _dense("Qwen3-8B", 36, 4096, 32, 12_288),
        # SpecActor 5.1: the policy and its drafters
        _dense("Qwen2.5-32B", 64, 5120, 40, 27_648, vocab_size=152_064),
        _dense("Qwen2.5-1.5B", 28, 1536, 12, 8960, **_SMALL),
        _dense("Qwen2.5-0.5B", 24, 896, 14, 4864, head_dim=64, **_SMALL),
    )
}
"""Models of the seeds by name, from their published configurations."""
