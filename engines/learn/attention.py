"""Attention of the samples of a micro-batch, which lie end to end in one row: in memory that grows
with the number of tokens, and none sees another. The model's mask says what each sees of its own.

    CUDA, 16 bits, no soft cap or sink    flash attention of torch, by the samples' bounds
    else                                  samples of like length side by side, causal and filled up
                                          to the right, where nobody looks; in blocks with a
                                          window, chunks, a soft cap or a sink

Heads of keys and values that several query heads share are not repeated, where torch's kernels do
not want them to be. transformers' models find it by the name `PACKED`. What it is given and does
not know is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from engines.learn.row_mask import PACKED, RowMask

BLOCK = 512
"""Queries of a block at most, where all keys cannot be looked at by one kernel."""
MAX_SCORES = 2**28
"""Scores of a block at most: 1 GiB in float32."""
FLASH_WIDTH = 256
"""Widest head that flash attention takes."""
HARMLESS = {"position_ids", "use_cache", "output_attentions", "output_hidden_states"}
"""Arguments of attention that change nothing where samples lie in one row and there is no cache."""


class Scores(NamedTuple):
    """How the scores of queries and keys are made, beside their mask."""

    scale: float
    softcap: float | None = None
    sink: Float[Tensor, "heads"] | None = None
    """Score of a key with the value 0 that each query of a head sees too."""


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens width"],
    key: Float[Tensor, "1 kv_heads tokens width"],
    value: Float[Tensor, "1 kv_heads tokens value_width"],
    attention_mask: RowMask,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, "heads"] | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "1 tokens heads value_width"], None]:
    """Attention as transformers' models ask for it. `s_aux`: their name for sinks. Raises
    ValueError for a mask or an argument that it does not know."""
    del sliding_window  # The mask has it too, as in transformers' own eager attention.
    mask = _known_mask(module, attention_mask)
    _refuse_unknown(module, others)
    # Under autocast what was normed and turned is float32 again.
    rows = [tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value)]
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    if softcap is None and s_aux is None and _takes_flash(rows):
        return by_bounds(rows, mask, scores.scale)[None], None
    parts = []
    for group in mask.segments.groups:
        q, k, v = (row[group.take].transpose(1, 2) for row in rows)
        parts.append(_attend(q, k, v, mask, scores).transpose(1, 2).flatten(0, 1)[group.keep])
    return torch.cat(parts)[None], None


def _known_mask(module: nn.Module, mask: object) -> RowMask:
    if isinstance(mask, RowMask):
        return mask
    raise ValueError(
        f"{_name(module)} gives its attention {'no mask' if mask is None else 'a mask of its own'}"
        ": this trainer computes masks that transformers makes alone"
    )


def _refuse_unknown(module: nn.Module, others: Mapping[str, Any]) -> None:
    """`dropout` is 0 and `is_causal` true where they are given at all."""
    off = {"dropout": 0.0, "is_causal": True}
    for name, value in others.items():
        if name not in HARMLESS and value is not None and (name not in off or value != off[name]):
            raise ValueError(
                f"{_name(module)} gives its attention the argument {name}, which this trainer "
                "does not compute"
            )


def _name(module: nn.Module) -> str:
    config = getattr(module, "config", None)
    kind = f" of {config.model_type}" if config is not None else ""
    return f"{type(module).__name__}{kind}"


def _takes_flash(rows: Sequence[Tensor]) -> bool:
    width, value = max(row.shape[-1] for row in rows), rows[-1]
    return value.is_cuda and value.dtype in (torch.bfloat16, torch.float16) and width <= FLASH_WIDTH


def by_bounds(
    rows: Sequence[Tensor], mask: RowMask, scale: float
) -> Float[Tensor, "tokens heads value_width"]:
    """Attention by torch's flash attention of rows (`query, key, value`) in 16 bits."""
    from torch.nn.attention.varlen import varlen_attn

    segments = mask.segments.cut(mask.chunk)
    bounds, longest = segments.bounds, segments.longest
    # Its kernels want heads of one width, a multiple of 8. Zeros add nothing to a score.
    widths = [row.shape[-1] for row in rows]
    wide = [F.pad(row, (0, -(-max(widths) // 8) * 8 - row.shape[-1])) for row in rows]
    out = varlen_attn(
        *wide,
        *(bounds, bounds),
        *(longest, longest),
        scale=scale,
        window_size=(-1 if mask.window is None else mask.window - 1, 0),
        enable_gqa=True,
    )
    assert isinstance(out, Tensor)
    return out[..., : widths[-1]]


def _attend(
    q: Float[Tensor, "samples heads length width"],
    k: Float[Tensor, "samples kv_heads length width"],
    v: Float[Tensor, "samples kv_heads length value_width"],
    mask: RowMask,
    scores: Scores,
) -> Float[Tensor, "samples heads length value_width"]:
    reach = min(mask.window or q.shape[2], mask.chunk or q.shape[2])
    if reach >= q.shape[2] and scores.softcap is None and scores.sink is None:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scores.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return _in_blocks(q, k, v, mask, scores)


def _in_blocks(
    q: Float[Tensor, "samples heads length width"],
    k: Float[Tensor, "samples kv_heads length width"],
    v: Float[Tensor, "samples kv_heads length value_width"],
    mask: RowMask,
    scores: Scores,
) -> Float[Tensor, "samples heads length value_width"]:
    """Attention that looks at no more keys than it must, computed again in the backward pass."""
    length = q.shape[2]
    keys = min(length, (mask.window or mask.chunk or length) + BLOCK)
    size = max(1, min(BLOCK, MAX_SCORES // (q.shape[0] * q.shape[1] * keys)))
    grouped = q.unflatten(1, (k.shape[1], -1))
    parts = []
    for start in range(0, length, size):
        end = min(start + size, length)
        first = max(0, start - mask.window + 1) if mask.window else 0
        if mask.chunk:
            first = max(first, start // mask.chunk * mask.chunk)
        block = grouped[..., start:end, :], k[:, :, None, first:end], v[:, :, None, first:end]
        looks = (mask, start, first, *scores)
        parts.append(checkpoint(_block, *block, *looks, use_reentrant=False))
    return torch.cat(parts, -2).flatten(1, 2)


def _block(
    q: Float[Tensor, "samples kv_heads shared queries width"],
    k: Float[Tensor, "samples kv_heads 1 keys width"],
    v: Float[Tensor, "samples kv_heads 1 keys value_width"],
    mask: RowMask,
    start: int,
    first: int,
    *how: Any,
) -> Tensor:
    """`start` and `first`: positions of the first query and of the first key."""
    scale, softcap, sink = Scores(*how)
    scores = (q @ k.transpose(-1, -2) * scale).float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    queries = torch.arange(start, start + q.shape[-2], device=q.device)
    keys = torch.arange(first, first + k.shape[-2], device=q.device)
    scores = scores.masked_fill(~mask.sees(queries[:, None], keys), -torch.inf)
    if sink is not None:
        column = sink.float().view(k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., : k.shape[-2]].to(v.dtype) @ v


AttentionInterface.register(PACKED, packed_attention)
