"""Measure how much of the adapters' update is left when engines get rounded, merged weights.

bfloat16 keeps 8 bits of a weight. An update of less than half its last bit is lost: with W = 0.02
and an update of 1e-5, engines get 0.02. The trainer computes with the whole update, so its policy
differs from the engines' policy.
"""

import torch
from torch import Tensor

LOW = 0.5
"""Share below which the run gets a warning."""
SAMPLE = 2**20
"""Approximate number of elements checked in each weight."""


class KeptUpdate:
    """Share of an update that rounding leaves: its projection on the exact update, 1 for all of it.
    Elements that round up to a whole last bit count for more than their exact update."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def add(self, before: Tensor, after: Tensor) -> None:
        """Add a weight, before and after its update."""
        # An odd stride reaches every column of a matrix.
        stride = before.numel() // SAMPLE | 1
        old, new = (tensor.reshape(-1)[::stride].float() for tensor in (before, after))
        wanted = new - old
        got = new.to(self._dtype).float() - old.to(self._dtype).float()
        self._sums.append(torch.stack([(got * wanted).sum(), wanted.square().sum()]).double())

    @property
    def share(self) -> float | None:
        """Share over all weights so far; None if there was nothing to update."""
        if not self._sums:
            return None
        arrived, wanted = torch.stack(self._sums).sum(0).tolist()
        return arrived / wanted if wanted > 0.0 else None


def warning_of(share: float, dtype: str) -> str:
    """Return a warning that says what to do about a low share."""
    return (
        f"engines get {share:.0%} of the adapters' update: merged weights are rounded to "
        f"{dtype}, which loses small updates. This is normal in the first steps. If "
        "actor/lora_arrived stays low, raise trainer.learning_rate or trainer.lora.alpha, or set "
        "model.dtype=float32"
    )
