"""How much of what adapters have learnt is left when merged weights are rounded for the engines.

bfloat16 keeps 8 bits of a weight. An update of less than half its last bit is gone: of W = 0.02 and
an update of 1e-5, engines get 0.02. The trainer computes with the whole update, so its policy and
the engines' are then two.
"""

import torch
from torch import Tensor

LOW = 0.5
"""Share below which a run is warned."""
SAMPLE = 2**20
"""Elements of each weight that are looked at, about."""


class Arrival:
    """Share of an update that rounding leaves: its projection on what was wanted, 1 for all of it.
    Elements that round up to a whole last bit count for more than they wanted."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def add(self, before: Tensor, after: Tensor) -> None:
        """Look at a weight without and with its update."""
        # An odd stride meets every column of a matrix.
        stride = before.numel() // SAMPLE | 1
        old, new = (tensor.reshape(-1)[::stride].float() for tensor in (before, after))
        wanted = new - old
        got = new.to(self._dtype).float() - old.to(self._dtype).float()
        self._sums.append(torch.stack([(got * wanted).sum(), wanted.square().sum()]).double())

    @property
    def share(self) -> float | None:
        """The share of all weights so far; None where nothing was to change."""
        if not self._sums:
            return None
        arrived, wanted = torch.stack(self._sums).sum(0).tolist()
        return arrived / wanted if wanted > 0.0 else None


def warning_of(share: float, dtype: str) -> str:
    """Say what to do about a low share."""
    return (
        f"engines get {share:.0%} of what the adapters have learnt: merged weights are rounded to "
        f"{dtype}, which drops smaller updates. This is usual in the first steps. If "
        "actor/lora_arrived stays low, raise trainer.learning_rate or trainer.lora.alpha, or set "
        "model.dtype=float32"
    )
