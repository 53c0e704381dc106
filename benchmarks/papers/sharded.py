"""Latencies of a paper's engines at other TP degrees than it prints. Pure.

A step is reading the weights and what comes on top of it: kernels, collectives, the host. From TP t
to TP u weights, computation and KV cache are shared by u GPUs in place of t, what comes on top
stays, and the two all-reduces of a layer take 2 (u - t) hops more each.

Deviation: the hop is that of `engines.latency.hardware` for NVLink; what an all-reduce moves is
left out, as it is small beside its hops at the batches at which a switch pays.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.papers.drafters import BYTES_PER_S
from benchmarks.papers.settings import LinearLatency
from engines.latency.hardware import H100
from engines.latency.interface import Latency
from engines.latency.model_shape import ModelShape


@dataclass(frozen=True)
class ShardedLatency:
    """One model for each TP degree; implements `Latency`."""

    by_tp: Mapping[int, Latency]
    lookup_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds a token of drafters that look tokens up; the others are known to the models."""

    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float:
        return self.by_tp[tp_degree].decode_s(tp_degree, batch, context_tokens)

    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float:
        return self.by_tp[tp_degree].prefill_s(tp_degree, batch, rms_tokens)

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        return self.by_tp[tp_degree].verify_s(tp_degree, batch, context_tokens, window)

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        """Drafting on GPUs of its own, the same at every TP degree."""
        if drafter in self.lookup_s:
            return self.lookup_s[drafter] * window * batch
        return self.by_tp[min(self.by_tp)].draft_s(drafter, batch, window)


def reshard(printed: LinearLatency, shape: ModelShape, tp_degree: int, to_tp: int) -> LinearLatency:
    """`printed` is of `tp_degree`."""
    share = tp_degree / to_tp
    weights_s = shape.weight_bytes / (tp_degree * BYTES_PER_S)
    hops_s = shape.num_layers * 2 * 2 * (to_tp - tp_degree) * H100.hop_s
    return replace(
        printed,
        step_s=printed.step_s - weights_s * (1 - share) + hops_s,
        sequence_s=printed.sequence_s * share,
        token_s=printed.token_s * share,
        prefill_token_s=printed.prefill_token_s * share,
    )
