"""Costs of a switch to another TP degree (PAT, section 4.3). Pure.

    T_switch  = control + weights + min(T_move, T_recompute)
    move        S = sum_i k L_i / TP_src,  T_move = S / bandwidth              (equations 1 and 2)
    recompute   T_recompute = prefill(B, L_RMS; TP_target), L_RMS = sqrt(sum L_i^2 / B)   (3 and 4)

k: bytes of keys and values of one token, over all layers and KV heads; L_i: context tokens of an
unfinished sample, B of them. A rank has no less than one KV head.

Deviations:
- Equation 1 writes the hidden size H where grouped-query attention has KV heads times head size,
  a quarter of H in LLaMA3.1-8B. Here it is what there is.
- `staged` is how engines that are processes of their own do it: each source engine writes what it
  has to host memory, all at once, then each target engine reads what it gets. The slowest of either
  counts. Where the former is done ahead (`ahead`), requests go on while it takes its time
  (`ahead_s`), and what came since is saved at the switch. Off: one transfer among the GPUs, by
  equation 1 as it is printed.
- The merged batch is prefilled by several target engines where TP' leaves room for them, each its
  own share; the slowest counts.
- Engines of the other layout wait with their weights, graphs and communication groups, so that
  control is waking one (`wake_s`), and there is nothing to reshard, capture or group.

Figure 12 (LLaMA3.1-8B, 8 A40, TP 2 to 8, 9 samples of 12K): 14.2 s of recomputation by the
analytic model, 19.01 printed; 2.36 s of migration are 3.1 GB/s of one rank by equation 1 with KV
heads, 12.3 GB/s with H as printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import numpy as np

from engines.latency.interface import Latency
from schemas.counts import SwitchCounts

Batch = Sequence[float]
"""Context tokens of each unfinished request of one engine."""


@dataclass(frozen=True, slots=True)
class SwitchCost:
    """Cost of one switch, in seconds."""

    control_s: float
    """Waking engines, and loading their weights where they have none."""
    state_s: float
    """Time until the keys and values of unfinished requests are there."""
    move_kv: bool
    """They are moved, not computed again."""

    @property
    def seconds(self) -> float:
        return self.control_s + self.state_s


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """Predicts the costs of switches on one kind of node with one model."""

    latency: Latency
    kv_bytes_per_token: float
    """Keys and values of a token over all layers and heads (`ModelShape.kv_bytes_per_token`)."""
    num_kv_heads: int
    link_bytes_per_s: float
    """One way, of one rank, as measured with such transfers: to host memory if `staged`."""
    wake_s: float
    """Pausing engines and waking others: what every switch costs."""
    weights_s: float = 0.0
    """Loading the weights of those woken; 0 when they are kept current."""
    kv: Literal["auto", "move", "recompute"] = "auto"
    """`auto`: whichever is faster."""
    staged: bool = True
    """Through host memory. Off: between GPUs, as in the paper."""
    ahead: bool = True
    """Saved to host memory while the requests go on: a switch waits for what is loaded alone."""

    def as_measured(self, switches: SwitchCounts) -> "SwitchCosts":
        """Costs as the last switches had them, their medians, as far as there were any."""
        return replace(
            self,
            wake_s=median(switches.control_s or [self.wake_s]),
            link_bytes_per_s=median(switches.link_bytes_per_s or [self.link_bytes_per_s]),
        )

    @property
    def ways(self) -> tuple[bool, ...]:
        """Whether keys and values may be moved, and whether they may be computed again."""
        return {"auto": (True, False), "move": (True,), "recompute": (False,)}[self.kv]

    @property
    def control_s(self) -> float:
        """Cost of a switch of a pool that has no requests."""
        return self.wake_s + self.weights_s

    def cost(
        self, from_tp: int, to_tp: int, sources: Sequence[Batch], targets: Sequence[Batch]
    ) -> SwitchCost:
        """Cost of taking the requests of these engines, dealt anew, to those."""
        if not any(targets):
            return SwitchCost(self.control_s, 0.0, self.kv != "recompute")
        times_s = {}
        if self.kv != "recompute":
            times_s[True] = self.move_s(from_tp, to_tp, sources, targets)
        if self.kv != "move":
            times_s[False] = self.recompute_s(to_tp, targets)
        # Of equal times, moved.
        move_kv = min(times_s, key=times_s.__getitem__)
        return SwitchCost(self.control_s, times_s[move_kv], move_kv)

    def move_s(
        self,
        from_tp: int,
        to_tp: int,
        sources: Sequence[Batch],
        targets: Sequence[Batch],
        since_tokens: float = 0.0,
    ) -> float:
        """T_move. `since_tokens`: most that came to one engine since it was saved ahead."""
        if not self.staged:
            return self.transfer_s(from_tp, sum(map(sum, sources)))
        to_save = since_tokens if self.ahead else max(map(sum, sources))
        loaded = max(map(sum, targets))
        return self.transfer_s(from_tp, to_save) + self.transfer_s(to_tp, loaded)

    def ahead_s(self, from_tp: int, sources: Sequence[Batch]) -> float:
        """Seconds until these are saved ahead: a switch that moves them waits, they go on."""
        if not (self.staged and self.ahead):
            return 0.0
        return self.transfer_s(from_tp, max(map(sum, sources)))

    def recompute_s(self, to_tp: int, targets: Sequence[Batch]) -> float:
        """T_recompute."""
        return max(
            self.latency.prefill_s(to_tp, len(batch), rms_tokens(batch))
            for batch in targets
            if batch
        )

    def transfer_s(self, tp_degree: int, context_tokens: float) -> float:
        """Seconds in which one engine saves or loads keys and values of so many tokens."""
        rank_bytes = self.kv_bytes_per_token * context_tokens / min(tp_degree, self.num_kv_heads)
        return rank_bytes / self.link_bytes_per_s


def rms_tokens(batch: Batch) -> float:
    """L_RMS (equation 3): B L_RMS^2 = sum L_i^2."""
    return float(np.sqrt(np.mean(np.square(batch))))
