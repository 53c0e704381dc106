"""Grid of the points that a profile measures: sparse, as far as the KV cache goes (PAT 4.2).

    batch 256 | x  x
          128 | x  x  x  x           every x holds batch * length <= max_active_tokens
           .. | x  x  x  x  x
            1 | x  x  x  x  x
              └──────────────── length of each sequence

Deviation: PAT's grid has one fixed set of lengths; here the lengths of a batch size are spread over
what fits, so that every batch size has a curve up to its own end.
"""

import random
from collections.abc import Sequence
from functools import partial

from schemas.latency import PointKind
from schemas.profile import Measurement

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
_LENGTH_SHARES = (0.05, 0.25, 0.5, 0.75, 1.0)
_SHORT_LENGTHS = (32, 128, 384)
"""Lengths below 512 that every batch size has beside these, as far as they lie below all of them:
there times bend the most (PAT 4.2)."""
_EVERY_OTHER = 2


def decode_grid(
    tp_degree: int, max_batch: int, max_context: int, max_active_tokens: int, decode_steps: int
) -> list[Measurement]:
    """Measurements of decoding and, with the same prompts, prefill.

    `max_context`: longest sequence, in tokens. `max_active_tokens`: tokens that the KV cache of an
    engine holds. `decode_steps`: tokens that each sequence grows by while it is measured. Raises
    ValueError when the sequences or the cache are too short for a curve.
    """
    decode = partial(Measurement, kind=PointKind.DECODE, tp_degree=tp_degree)
    grid = []
    for batch in batches_up_to(max_batch):
        longest = min(max_context, max_active_tokens // batch) - decode_steps
        if longest >= len(_LENGTH_SHARES):
            lengths = _lengths_up_to(longest)
            grid += [decode(batch=batch, prompt_tokens=length) for length in lengths]
    if len({point.batch for point in grid}) < 2:
        raise ValueError(
            f"no room to measure: {max_context} tokens of context and a KV cache of "
            f"{max_active_tokens} tokens for {decode_steps} steps of two batch sizes; "
            "raise max_context, max_batch or kv_cache_bytes, or lower decode_steps"
        )
    return grid


def _lengths_up_to(longest: int) -> list[int]:
    spread = sorted({round(share * longest) for share in _LENGTH_SHARES} - {0})
    return [*(length for length in _SHORT_LENGTHS if length < spread[0]), *spread]


def verify_grid(
    decode: Sequence[Measurement], windows: Sequence[int], max_step_tokens: int
) -> list[Measurement]:
    """Measurements of verification at the middle length of every other batch size of a decode grid.

    Left out: what an engine would split into several steps, as `batch * (window + 1)` exceeds
    `max_step_tokens`, and a window for which fewer than two batch sizes remain.
    """
    by_batch: dict[int, list[Measurement]] = {}
    for point in decode:
        by_batch.setdefault(point.batch, []).append(point)
    middles = [_middle(points) for points in by_batch.values()]
    grid = []
    for window in windows:
        fitting = [p for p in middles if p.batch * (window + 1) <= max_step_tokens]
        chosen = fitting[::-_EVERY_OTHER][::-1]
        if len(chosen) >= 2:
            verify = {"kind": PointKind.VERIFY, "window": window}
            grid += [point.model_copy(update=verify) for point in chosen]
    return grid


def _middle(points: Sequence[Measurement]) -> Measurement:
    half = max(point.prompt_tokens for point in points) / 2
    return min(points, key=lambda point: abs(point.prompt_tokens - half))


def draft_grid(verify: Sequence[Measurement], drafter: str) -> list[Measurement]:
    """Measurements of drafting what a verify grid verifies. A drafter has no TP degree of its
    own."""
    draft = {"kind": PointKind.DRAFT, "drafter": drafter, "tp_degree": 1}
    return [point.model_copy(update=draft) for point in verify]


def num_draft_windows(num_steps: int, window: int) -> int:
    """Windows that a draft model drafts, each after the one before, for one point: at least 2, and
    together about `num_steps` tokens."""
    return max(2, num_steps // window)


def batches_up_to(max_batch: int) -> list[int]:
    """About ten batch sizes, the largest one included; beyond 256 they double."""
    batches = [batch for batch in BATCHES if batch < max_batch]
    while batches and batches[-1] * 2 < max_batch:
        batches.append(batches[-1] * 2)
    return [*batches, max_batch]


def shuffled(points: Sequence[Measurement], seed: int) -> list[Measurement]:
    """Points in an order in which a machine that slows down for a while slows no one curve
    alone."""
    order = list(points)
    random.Random(seed).shuffle(order)
    return order
