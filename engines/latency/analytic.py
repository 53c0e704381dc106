"""Latency model from first principles, for hardware that was not measured.

A forward pass of n tokens on t GPUs (P layer parameters, P' output ones, e bytes each, D layers):

    linear     max(e (P + P') / (t BW), 2 (P n + P' outputs) / (t F))
    attention  max(kv_bytes tokens_read / (min(t, kv_heads) BW), 4 D heads head_dim pairs / (t F))
    collective 2 D max(floor, 2 (t - 1) hop + 2 (t - 1) / t  n hidden e / link)   0 for t = 1
    pass       linear + attention + collective + overhead + D layer          [seconds]

BW, F and link are the peaks times the shares of them that are reached (`hardware.py`). A step that
decodes or verifies B requests takes the host B times `request_s` more.

A pass reads weights and KV once. In a mixture of experts it reads the experts that its n tokens
use, and P n counts each token's own experts. Each layer has two ring all-reduces, after attention
and after the MLP (Megatron-LM).

    decode   n = B         outputs = B         tokens_read = T     pairs = T
    verify   n = B (w+1)   outputs = B (w+1)   tokens_read = T     pairs = T (w+1)
    prefill  n = B L       outputs = B         tokens_read = B L   pairs = B L^2 / 2
    draft    w decoding steps of the draft model on one GPU (SpecActor 4.1), or w B lookups

Deviations: the printed sources fit measurements, which have kinks at kernel tiles (PAT figure 6b);
a formula has none. Communication overlaps with nothing. Left out are activation traffic, chunked
prefill, the all-gather of logits and pairs among draft tokens. PAT's L is a root mean square
(equation 3): exact for pairs, an upper bound for n.
"""

from collections.abc import Mapping

from refrain.engines.latency.hardware import Hardware
from refrain.engines.latency.model_shape import ModelShape

LOOKUP_S = 2e-7
"""Seconds to look up one draft token: "hundreds of CPU cycles" (RhymeRL 7.4)."""
_DRAFT_CONTEXT_TOKENS = 4096.0
"""Mean context per sequence that a draft model reads."""
_ENGINE_SHARE = 0.9
"""Share of each GPU's memory that weights and KV may use together."""


class AnalyticLatency:
    """Predicted times of a model on hardware with a data sheet; implements `Latency`."""

    def __init__(
        self,
        model_shape: ModelShape,
        hardware: Hardware,
        drafters: Mapping[str, ModelShape | float] | None = None,
    ):
        """`drafters`: by name, a draft model, or the seconds per token of a lookup (`LOOKUP_S`)."""
        self.model_shape = model_shape
        self.hardware = hardware
        self._drafters = {
            name: AnalyticLatency(of, hardware) if isinstance(of, ModelShape) else of
            for name, of in (drafters or {}).items()
        }

    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float:
        return self.verify_s(tp_degree, batch, context_tokens, window=0)

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        if window < 0:
            raise ValueError(f"a draft window is at least 0, not {window}")
        positions = window + 1
        return self.hardware.request_s * batch + self._pass_s(
            tp_degree,
            tokens=batch * positions,
            outputs=batch * positions,
            tokens_read=context_tokens,
            pairs=context_tokens * positions,
        )

    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float:
        return self._pass_s(
            tp_degree,
            tokens=batch * rms_tokens,
            outputs=batch,
            tokens_read=batch * rms_tokens,
            pairs=batch * rms_tokens**2 / 2,
        )

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        if drafter not in self._drafters:
            known = ", ".join(sorted(self._drafters)) or "none"
            raise ValueError(f"no drafter {drafter!r}; known: {known}")
        model = self._drafters[drafter]
        if isinstance(model, AnalyticLatency):
            return window * model.decode_s(1, batch, batch * _DRAFT_CONTEXT_TOKENS)
        return model * window * batch

    def collective_s(self, tp_degree: int, tokens: float) -> float:
        """Return the time of one ring all-reduce of the hidden states of `tokens` tokens."""
        size = tokens * self.model_shape.hidden_size * self.model_shape.element_bytes
        link = self.hardware.link_bytes_per_s * self.hardware.link_share
        num_hops = 2 * (tp_degree - 1)
        ring_s = num_hops * (self.hardware.hop_s + size / (tp_degree * link))
        return max(ring_s, self.hardware.collective_s) if num_hops else 0.0

    def all_reduces_s(self, tp_degree: int, tokens: float) -> float:
        """Return the time of all all-reduces in a pass of `tokens` tokens."""
        return 2 * self.model_shape.num_layers * self.collective_s(tp_degree, tokens)

    def kv_capacity_tokens(self, tp_degree: int) -> int:
        """Return how many tokens fit in the KV cache of one engine beside the weights; 0 if the
        weights do not fit."""
        self._require_layout(tp_degree)
        per_gpu = self.hardware.memory_bytes * _ENGINE_SHARE
        free = per_gpu - self.model_shape.weight_bytes / tp_degree
        shards = min(tp_degree, self.model_shape.num_kv_heads)
        return max(0, int(free * shards / self.model_shape.kv_bytes_per_token))

    def _pass_s(
        self, tp_degree: int, tokens: float, outputs: float, tokens_read: float, pairs: float
    ) -> float:
        self._require_layout(tp_degree)
        if tokens <= 0 or tokens_read < 0:
            raise ValueError(f"a step needs tokens: {tokens} new, {tokens_read} of context")
        shape, hardware = self.model_shape, self.hardware
        bandwidth = hardware.memory_bytes_per_s * hardware.memory_share
        flops = hardware.flops_per_s * hardware.flops_share * tp_degree
        linear_flops = 2 * (shape.active_layer_params * tokens + shape.head_params * outputs)
        linear_s = max(shape.step_bytes(tokens) / (tp_degree * bandwidth), linear_flops / flops)
        kv_shards = min(tp_degree, shape.num_kv_heads)
        kv_s = shape.kv_bytes_per_token * tokens_read / (kv_shards * bandwidth)
        pair_flops = 4 * shape.num_layers * shape.num_heads * shape.head_dim
        attention_s = max(kv_s, pair_flops * pairs / flops)
        collectives_s = self.all_reduces_s(tp_degree, tokens)
        overhead_s = hardware.step_overhead_s + shape.num_layers * hardware.layer_s
        return linear_s + attention_s + collectives_s + overhead_s

    def _require_layout(self, tp_degree: int) -> None:
        if not 1 <= tp_degree <= self.hardware.gpus_per_node:
            raise ValueError(
                f"tp_degree {tp_degree} must be between 1 and the {self.hardware.gpus_per_node} "
                f"GPUs of one {self.hardware.name} node"
            )
        if self.model_shape.num_heads % tp_degree:
            raise ValueError(
                f"{self.model_shape.name} has {self.model_shape.num_heads} attention heads, "
                f"which tp_degree {tp_degree} does not divide"
            )
