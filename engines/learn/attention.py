"""Attention of the samples of a micro-batch, which lie end to end in one row: in memory that grows
with the number of tokens, without a mask, and none sees another.

    CUDA, 16 bits, no soft cap    flash attention of torch, by the samples' bounds
    else                          samples of like length side by side, causal and filled up to the
                                  right, where nobody looks; with a window or a soft cap in blocks

Heads of keys and values that several query heads share are not repeated, where torch's kernels do
not want them to be. transformers' models find it by the name `PACKED`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface

PACKED = "refrain_packed"
LIKE_LENGTH = 0.8
"""Shortest sample of a group, over its longest."""
BLOCK = 512
"""Queries of a block, where all keys cannot be looked at by one kernel."""


class LikeSamples(NamedTuple):
    """Samples of like length, one after another in the row."""

    take: Int[Tensor, "samples length"]
    """Tokens, filled up with the last one of each sample."""
    keep: Int[Tensor, "tokens"]
    """Places of the flattened `take` that are not filled up."""


@dataclass(frozen=True)
class SampleBounds:
    """Bounds of the samples in a row."""

    bounds: Int[Tensor, "samples+1"]
    """First token of each sample, and the end of the last; int32."""
    longest: int
    groups: tuple[LikeSamples, ...]

    @classmethod
    def of(cls, num_tokens: Sequence[int], device: torch.device) -> "SampleBounds":
        """`num_tokens`: of each sample, the longest first."""
        bounds = np.concatenate([[0], np.cumsum(num_tokens)]).astype(np.int32)
        groups, first = [], 0
        while first < len(num_tokens):
            end = first + 1
            while end < len(num_tokens) and num_tokens[end] >= LIKE_LENGTH * num_tokens[first]:
                end += 1
            groups.append(_group(bounds[first : end + 1], device))
            first = end
        return cls(torch.from_numpy(bounds).to(device), max(num_tokens), tuple(groups))


def _group(bounds: np.ndarray, device: torch.device) -> LikeSamples:
    starts, lengths = bounds[:-1, None].astype(np.int64), np.diff(bounds)[:, None]
    places = np.arange(lengths[0, 0])
    take = starts + np.minimum(places, lengths - 1)
    keep = np.flatnonzero(places < lengths)
    return LikeSamples(torch.from_numpy(take).to(device), torch.from_numpy(keep).to(device))


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens width"],
    key: Float[Tensor, "1 kv_heads tokens width"],
    value: Float[Tensor, "1 kv_heads tokens width"],
    attention_mask: None,
    *,
    segments: SampleBounds,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "1 tokens heads width"], None]:
    """Attention as transformers' models ask for it."""
    del module, attention_mask
    # Under autocast what was normed and turned is float32 again.
    rows = [tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value)]
    window = sliding_window if sliding_window and sliding_window < segments.longest else None
    if value.is_cuda and value.dtype in (torch.bfloat16, torch.float16) and softcap is None:
        return by_bounds(rows, segments, scaling, window)[None], None
    parts = []
    for group in segments.groups:
        q, k, v = (row[group.take].transpose(1, 2) for row in rows)
        if softcap is None and (window is None or window >= q.shape[2]):
            shared = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=shared
            )
        else:
            out = _in_blocks(q, k, v, scaling, window, softcap)
        parts.append(out.transpose(1, 2).flatten(0, 1)[group.keep])
    return torch.cat(parts)[None], None


def by_bounds(
    rows: Sequence[Tensor], segments: SampleBounds, scaling: float | None, window: int | None
) -> Float[Tensor, "tokens heads width"]:
    """Attention by torch's flash attention of rows (`query, key, value`) in 16 bits."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = segments.bounds, segments.longest
    left = -1 if window is None else window - 1
    out = varlen_attn(
        *rows,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(left, 0),
        enable_gqa=True,
    )
    assert isinstance(out, Tensor)
    return out


def _in_blocks(
    q: Float[Tensor, "samples heads length width"],
    k: Float[Tensor, "samples kv_heads length width"],
    v: Float[Tensor, "samples kv_heads length width"],
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Float[Tensor, "samples heads length width"]:
    """Attention that looks at no more keys than it must, computed again in the backward pass."""
    length, width = q.shape[2:]
    grouped = q.unflatten(1, (k.shape[1], -1))
    scale = scaling if scaling is not None else width**-0.5
    parts = []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        first = max(0, start - window + 1) if window else 0
        block = grouped[..., start:end, :], k[:, :, None, first:end], v[:, :, None, first:end]
        looks = (scale, window, softcap, start - first)
        parts.append(checkpoint(_block, *block, *looks, use_reentrant=False))
    return torch.cat(parts, -2).flatten(1, 2)


def _block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    ahead: int,
) -> Tensor:
    """`ahead`: keys before the first query's own."""
    scores = (q @ k.transpose(-1, -2) * scale).float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    since = (
        torch.arange(q.shape[-2], device=q.device)[:, None]
        + ahead
        - torch.arange(k.shape[-2], device=q.device)
    )
    hidden = since < 0 if window is None else (since < 0) | (since >= window)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype) @ v


def no_mask(*_: Any, **__: Any) -> None:
    """Mask for transformers' models: their samples' bounds say more."""


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, no_mask)
