"""Costs of keys and values that go to other engines: in a switch to another TP degree (PAT, section
4.3), and with a request that is raced or migrates. Pure.

    T_switch  = control + weights + min(T_move, T_recompute)
    move        S = sum_i k L_i / TP_src,  T_move = S / bandwidth              (equations 1 and 2)
    recompute   T_recompute = prefill(B, L_RMS; TP_target), L_RMS = sqrt(sum L_i^2 / B)   (3 and 4)

k: bytes of keys and values per token, over all layers and KV heads. L_i: context tokens of an
unfinished sample, B of them. A rank has at least one KV head.

Deviations:
- Equation 1 has the hidden size H. With grouped-query attention the keys and values have KV heads
  times head size instead, which is a quarter of H in LLaMA3.1-8B. We use the actual size.
- `staged`: engines are separate processes. All source engines write their keys and values to host
  memory at once. Then each target engine reads its part. The slowest engine of each phase counts.
  With `ahead`, the first write happens before the switch (`ahead_s`) while requests go on. At the
  switch, engines save only the tokens since then. Without `staged`, there is one transfer among the
  GPUs, by equation 1 as printed.
- If TP' leaves room for several target engines, each prefills its share of the merged batch. The
  slowest counts.
- Engines of the other layout wait with their weights, graphs and communication groups ready. So
  control means to wake one (`wake_s`); nothing is resharded, captured or grouped.

Figure 12 (LLaMA3.1-8B, 8 A40, TP 2 to 8, 9 samples of 12K): recomputation takes 14.2 s by the
analytic model, 19.01 s in the paper. The paper's 2.36 s of migration mean 3.1 GB/s per rank by
equation 1 with KV heads, or 12.3 GB/s with H as printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import numpy as np

from refrain.engines.latency.interface import Latency
from refrain.schemas.counts import SwitchCounts

Batch = Sequence[float]
"""Context tokens of one engine's unfinished requests."""


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """Predicted costs of switches, for one kind of node and one model."""

    latency: Latency
    kv_bytes_per_token: float
    """Bytes of a token's keys and values, over all layers and heads
    (`ModelShape.kv_bytes_per_token`)."""
    num_kv_heads: int
    link_bytes_per_s: float
    """Bandwidth of one rank in one direction, as measured: to host memory if `staged`."""
    wake_s: float
    """Seconds to pause engines and wake others. Every switch takes them."""
    weights_s: float = 0.0
    """Seconds to load the weights of the woken engines. 0 if their weights are current."""
    kv: Literal["auto", "move", "recompute"] = "auto"
    """`auto`: the faster of both."""
    staged: bool = True
    """Move through host memory. Off: between GPUs, as in the paper."""
    ahead: bool = True
    """Save to host memory before the switch, while requests go on. The switch then waits for the
    loading only."""

    def as_measured(self, switches: SwitchCounts) -> "SwitchCosts":
        """Return the costs with the medians of the last switches, if there were any."""
        return replace(
            self,
            wake_s=median(switches.control_s or [self.wake_s]),
            link_bytes_per_s=median(switches.link_bytes_per_s or [self.link_bytes_per_s]),
        )

    @property
    def ways(self) -> tuple[bool, ...]:
        """Ways to bring keys and values over: True moves them, False recomputes them."""
        return {"auto": (True, False), "move": (True,), "recompute": (False,)}[self.kv]

    @property
    def control_s(self) -> float:
        """Seconds of a switch for a pool without requests."""
        return self.wake_s + self.weights_s

    def move_s(
        self,
        from_tp: int,
        to_tp: int,
        sources: Sequence[Batch],
        targets: Sequence[Batch],
        since_tokens: float = 0.0,
    ) -> float:
        """Return T_move. `since_tokens`: most new tokens of one engine since it saved ahead."""
        if not self.staged:
            return self.transfer_s(from_tp, sum(map(sum, sources)))
        to_save = since_tokens if self.ahead else max(map(sum, sources))
        loaded = max(map(sum, targets))
        return self.transfer_s(from_tp, to_save) + self.transfer_s(to_tp, loaded)

    def ahead_s(self, from_tp: int, sources: Sequence[Batch]) -> float:
        """Return seconds to save the sources ahead. The switch waits, while requests go on."""
        if not (self.staged and self.ahead):
            return 0.0
        return self.transfer_s(from_tp, max(map(sum, sources)))

    def recompute_s(self, to_tp: int, targets: Sequence[Batch]) -> float:
        """Return T_recompute."""
        return max(
            self.latency.prefill_s(to_tp, len(batch), rms_tokens(batch))
            for batch in targets
            if batch
        )

    def moves_kv(self, from_tp: int, to_tp: int, context_tokens: float) -> bool:
        """Return whether a request that is raced or migrates within a node should take its keys and
        values along: whether both engines together spend less time on them than a prefill takes."""
        moved_s = self.transfer_s(from_tp, context_tokens) + self.transfer_s(to_tp, context_tokens)
        again_s = self.recompute_s(to_tp, [[context_tokens]])
        return min(self.ways, key={True: moved_s, False: again_s}.__getitem__)

    def transfer_s(self, tp_degree: int, context_tokens: float) -> float:
        """Return seconds in which one engine saves or loads the keys and values of these tokens."""
        rank_bytes = self.kv_bytes_per_token * context_tokens / min(tp_degree, self.num_kv_heads)
        return rank_bytes / self.link_bytes_per_s


def rms_tokens(batch: Batch) -> float:
    """Return L_RMS (equation 3): B L_RMS^2 = sum L_i^2."""
    return float(np.sqrt(np.mean(np.square(batch))))
