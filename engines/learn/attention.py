"""Attention for the samples of a micro-batch, which lie end to end in one row.

No sample sees another. Memory grows linearly with the number of tokens. The model's mask says what
each token sees of its own sample.

    CUDA, 16 bits, no soft cap or sink    torch's flash attention, with the samples' bounds
    all else                              samples of like length as one batch, causal, padded on
                                          the right; in blocks with a window, chunks, a soft cap
                                          or a sink

Ranks that share a row exchange tokens for heads before, and back after (`engines.learn.context`).
Key and value heads that several query heads share are repeated only where torch's kernels need it.
transformers' models find this attention by the name `PACKED`. It refuses arguments that it does not
know.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from refrain.engines.learn.recurrent import RECURRENT_BOUNDS
from refrain.engines.learn.row_mask import PACKED, RowMask

BLOCK = 512
"""Most queries of a block, when one kernel cannot take all keys."""
MAX_SCORES = 2**28
"""Most scores of a block: 1 GiB in float32."""
FLASH_WIDTH = 256
"""Widest head that flash attention supports."""
HARMLESS = {
    *("position_ids", "use_cache", "output_attentions", "output_hidden_states"),
    *RECURRENT_BOUNDS,
}
"""Arguments that change nothing when samples lie in one row and there is no cache. The mask has the
samples' bounds."""


class Scores(NamedTuple):
    """How to compute the scores of queries and keys, apart from the mask."""

    scale: float
    softcap: float | None = None
    sink: Float[Tensor, "heads"] | None = None
    """Score of an extra key with value 0, which every query of a head sees."""


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
    """Compute attention as transformers' models call it. `s_aux`: transformers' name for sinks.
    Raise ValueError for a mask or an argument that this function does not know."""
    del sliding_window  # The mask contains it, as in transformers' own eager attention.
    mask = _known_mask(module, attention_mask)
    _refuse_unknown(module, others)
    rows, split = rows_of(query, key, value), mask.segments.split
    if split is not None:
        rows, s_aux = split.to_heads(rows), None if s_aux is None else split.of_heads(s_aux)
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    if softcap is None and s_aux is None and _takes_flash(rows):
        out = by_bounds(rows, mask, scores.scale)
    else:
        out = _by_groups(rows, mask, scores)
    return (out if split is None else split.to_tokens(out))[None], None


def rows_of(
    query: Float[Tensor, "1 heads tokens width"],
    key: Float[Tensor, "1 kv_heads tokens width"],
    value: Float[Tensor, "1 kv_heads tokens value_width"],
) -> list[Float[Tensor, "tokens any_heads any_width"]]:
    """Return query, key and value as rows of tokens: views, unless autocast made norms and ropes
    return float32."""
    return [one.squeeze(0).transpose(0, 1).to(value.dtype) for one in (query, key, value)]


def _known_mask(module: nn.Module, mask: object) -> RowMask:
    if isinstance(mask, RowMask):
        return mask
    raise ValueError(
        f"{_name(module)} gives its attention {'no mask' if mask is None else 'a mask of its own'}"
        ": this trainer supports only masks that transformers makes"
    )


def _refuse_unknown(module: nn.Module, others: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown argument. `dropout` must be 0 and `is_causal` true, if
    given."""
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
    """Compute attention with torch's flash attention. `rows`: query, key and value in 16 bits."""
    from torch.nn.attention.varlen import varlen_attn

    segments = mask.segments.cut(mask.chunk)
    bounds, longest = segments.bounds, segments.longest
    # The kernels need heads of one width, a multiple of 8. Zeros add nothing to a score.
    widths = [row.shape[-1] for row in rows]
    width = -(-max(widths) // 8) * 8
    out = varlen_attn(
        *(
            row if row.shape[-1] == width else F.pad(row, (0, width - row.shape[-1]))
            for row in rows
        ),
        *(bounds, bounds),
        *(longest, longest),
        scale=scale,
        window_size=(-1 if mask.window is None else mask.window - 1, 0),
        enable_gqa=True,
    )
    assert isinstance(out, Tensor)
    return out[..., : widths[-1]]


def _by_groups(
    rows: Sequence[Tensor], mask: RowMask, scores: Scores
) -> Float[Tensor, "tokens heads value_width"]:
    """Compute attention with samples of like length as one batch."""
    parts = []
    for group in mask.segments.groups:
        q, k, v = (row[group.take].transpose(1, 2) for row in rows)
        parts.append(_attend(q, k, v, mask, scores).transpose(1, 2).flatten(0, 1)[group.keep])
    return torch.cat(parts)


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
    """Compute attention in blocks that read only the keys they need. The backward pass recomputes
    them."""
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
    """Compute one block. `start` and `first`: positions of its first query and first key."""
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
