"""Where each sample in a row begins, and which samples have like length."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

if TYPE_CHECKING:
    from refrain.engines.learn.context import RowSplit

LIKE_LENGTH = 0.8
"""Smallest ratio between the shortest and the longest sample of a group."""


class LikeSamples(NamedTuple):
    """Samples of like length, next to each other in the row."""

    take: Int[Tensor, "samples length"]
    """Index in the row of each token; padded with the sample's last token."""
    keep: Int[Tensor, "tokens"]
    """Indices into the flattened `take` that are not padding."""


@dataclass(frozen=True)
class SampleBounds:
    """Where each sample in a row begins."""

    bounds: Int[Tensor, "samples+1"]
    """First token of each sample, then the end of the last sample; int32."""
    longest: int
    groups: tuple[LikeSamples, ...]
    split: "RowSplit | None" = None
    """How ranks share the row; None: this rank has all of it."""

    @classmethod
    def of(
        cls, num_tokens: Sequence[int], device: torch.device, split: "RowSplit | None" = None
    ) -> "SampleBounds":
        """Build the bounds. `num_tokens`: tokens of each sample, the longest first."""
        bounds = np.concatenate([[0], np.cumsum(num_tokens)]).astype(np.int32)
        groups, first = [], 0
        while first < len(num_tokens):
            end = first + 1
            while end < len(num_tokens) and num_tokens[end] >= LIKE_LENGTH * num_tokens[first]:
                end += 1
            groups.append(_group(bounds[first : end + 1], device))
            first = end
        return cls(torch.from_numpy(bounds).to(device), max(num_tokens), tuple(groups), split)

    def cut(self, chunk: int | None) -> "SampleBounds":
        """Return the bounds of the samples' chunks of `chunk` tokens, without groups and split."""
        if chunk is None or chunk >= self.longest:
            return self
        bounds = self.bounds.tolist()
        starts = (range(one, two, chunk) for one, two in pairwise(bounds))
        edges = [*chain.from_iterable(starts), bounds[-1]]
        cut = torch.tensor(edges, dtype=torch.int32, device=self.bounds.device)
        return SampleBounds(cut, chunk, ())


def _group(bounds: np.ndarray, device: torch.device) -> LikeSamples:
    starts, lengths = bounds[:-1, None].astype(np.int64), np.diff(bounds)[:, None]
    places = np.arange(lengths[0, 0])
    take = starts + np.minimum(places, lengths - 1)
    keep = np.flatnonzero(places < lengths)
    return LikeSamples(torch.from_numpy(take).to(device), torch.from_numpy(keep).to(device))
