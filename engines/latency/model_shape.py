"""Sizes of a decoder-only transformer that determine its speed."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from refrain.schemas.base import Frozen

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
EXPERT_FIELDS = ("num_experts", "num_local_experts")
FURTHER_EXPERTS = ("n_routed_experts", "shared_expert_intermediate_size", "n_shared_experts")
"""Fields of mixtures whose layers have experts that all tokens use."""
QK_NORMED = ("qwen3", "gemma3")
"""Prefixes of the types of models that normalize queries and keys."""


class ModelShape(Frozen):
    """Model with grouped-query attention and a gated MLP, or a mixture of experts."""

    name: str
    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    """Width of the MLP, or of one expert."""
    vocab_size: PositiveInt
    num_experts: NonNegativeInt = 0
    """Experts of a layer; 0 for a dense model."""
    experts_per_token: PositiveInt = 1
    qk_norm: bool = False
    """Whether queries and keys are normalized, as in Qwen3."""
    tied_embeddings: bool = False
    """Whether the input and output embeddings share one matrix."""
    element_bytes: PositiveInt = 2
    """Bytes of one weight, activation or KV entry."""

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], name: str = "") -> "ModelShape":
        """Return the shape in the contents of a Hugging Face `config.json`. Raise ValueError if it
        lacks a field or is of an unsupported model."""
        required = ("num_hidden_layers", "hidden_size", "num_attention_heads")
        required += ("intermediate_size", "vocab_size")
        if missing := [field for field in required if config.get(field) is None]:
            raise ValueError(f"the model's configuration lacks {', '.join(missing)}")
        if experts := [field for field in FURTHER_EXPERTS if config.get(field)]:
            raise ValueError(
                f"this kind of mixture of experts is not supported: {experts[0]} is set"
            )
        num_experts = next((config[name] for name in EXPERT_FIELDS if config.get(name)), 0)
        inner = num_experts and config.get("moe_intermediate_size")
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
            intermediate_size=inner or config["intermediate_size"],
            vocab_size=config["vocab_size"],
            num_experts=num_experts,
            experts_per_token=config.get("num_experts_per_tok") or 1,
            qk_norm=str(config.get("model_type")).startswith(QK_NORMED),
            tied_embeddings=config.get("tie_word_embeddings", False),
            element_bytes=DTYPE_BYTES[dtype],
        )

    @cached_property
    def layer_params(self) -> int:
        """Parameters of all layers: Q, K, V, O and three matrices of each MLP, without norms."""
        return int(self._layers(self.num_experts or 1))

    @cached_property
    def active_layer_params(self) -> int:
        """Parameters of all layers that each token is multiplied with."""
        return int(self._layers(self.experts_per_token if self.num_experts else 1))

    def _layers(self, num_mlps: float) -> float:
        attention = 2 * self.head_dim * (self.num_heads + self.num_kv_heads)
        mlps = num_mlps * 3 * self.intermediate_size
        return self.num_layers * self.hidden_size * (attention + mlps + self.num_experts)

    @cached_property
    def head_params(self) -> int:
        """Parameters of the output projection. The input embedding has as many."""
        return self.hidden_size * self.vocab_size

    @property
    def num_params(self) -> int:
        return self.layer_params + self.head_params * (1 if self.tied_embeddings else 2)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.num_params * self.element_bytes

    def step_bytes(self, num_tokens: float) -> float:
        """Return the bytes of weights that a step of so many tokens reads. The input embedding is
        looked up, not read. In a mixture, count the experts that the tokens use on average, if each
        token chooses its experts uniformly and independently."""
        num_mlps: float = 1
        if self.num_experts:
            missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
            num_mlps = self.num_experts * (1 - missed)
        return (self._layers(num_mlps) + self.head_params) * self.element_bytes

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


def _mixture(name: str, layers: int, hidden: int, heads: int, inner: int) -> ModelShape:
    experts = {"num_kv_heads": 4, "qk_norm": True, "num_experts": 128, "experts_per_token": 8}
    return _dense(name, layers, hidden, heads, inner, **experts)


_TIED: dict[str, Any] = {"qk_norm": True, "tied_embeddings": True}
_SMALL = {"num_kv_heads": 2, "tied_embeddings": True}
SHAPES = {
    shape.name: shape
    for shape in (
        # PAT 5.1
        _dense("LLaMA3.1-8B", 32, 4096, 32, 14_336, vocab_size=128_256),
        _dense("Qwen3-14B", 40, 5120, 40, 17_408, qk_norm=True),
        # RhymeRL, table 3
        _dense("Qwen3-8B", 36, 4096, 32, 12_288, qk_norm=True),
        _dense("Qwen3-32B", 64, 5120, 64, 25_600, qk_norm=True),
        # mixtures
        _mixture("Qwen3-30B-A3B", 48, 2048, 32, 768),
        _mixture("Qwen3-235B-A22B", 94, 4096, 64, 1536),
        # of one GPU
        _dense("Qwen3-0.6B", 28, 1024, 16, 3072, **_TIED),
        _dense("Qwen3-1.7B", 28, 2048, 16, 6144, **_TIED),
        _dense("Qwen3-4B", 36, 2560, 32, 9728, **_TIED),
        # SpecActor 5.1: the policy and its drafters
        _dense("Qwen2.5-32B", 64, 5120, 40, 27_648, vocab_size=152_064),
        _dense("Qwen2.5-1.5B", 28, 1536, 12, 8960, **_SMALL),
        _dense("Qwen2.5-0.5B", 24, 896, 14, 4864, head_dim=64, **_SMALL),
    )
}
"""Models by name, from their published configurations: those of the papers, and smaller and larger
ones."""
