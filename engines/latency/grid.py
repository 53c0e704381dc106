"""Grid of the points that a profile measures: sparse, up to the size of the KV cache (PAT 4.2).

    batch 256 | x  x
          128 | x  x  x  x           every x holds batch * length <= max_active_tokens
           .. | x  x  x  x  x
            1 | x  x  x  x  x
              └──────────────── length of each sequence

Deviation: PAT uses the same lengths for all batch sizes. Here each batch size spreads its lengths
over the range that fits, so that its curve reaches its own end.
"""

import random
from collections.abc import Sequence
from functools import partial

from refrain.schemas.latency import PointKind
from refrain.schemas.profile import Measurement

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
_LENGTH_SHARES = (0.05, 0.25, 0.5, 0.75, 1.0)
_SHORT_LENGTHS = (32, 128, 384)
"""Lengths below 512 that a batch size also has if they are shorter than all its others. Times bend
most there (PAT 4.2)."""
_EVERY_OTHER = 2


def decode_grid(
    tp_degree: int, max_batch: int, max_context: int, max_active_tokens: int, decode_steps: int
) -> list[Measurement]:
    """Return measurements of decoding. Prefill is measured with the same prompts.

    `max_context`: longest sequence, in tokens.
    `max_active_tokens`: tokens that the KV cache of an engine holds.
    `decode_steps`: tokens by which each sequence grows during its measurement.

    Raise ValueError if the sequences or the cache are too short for a curve.
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
            f"no room to measure {decode_steps} steps of two batch sizes: the context has "
            f"{max_context} tokens and the KV cache {max_active_tokens}. "
            "Raise max_context, max_batch or kv_cache_bytes, or lower decode_steps"
        )
    return grid


def _lengths_up_to(longest: int) -> list[int]:
    spread = sorted({round(share * longest) for share in _LENGTH_SHARES} - {0})
    return [*(length for length in _SHORT_LENGTHS if length < spread[0]), *spread]


def verify_grid(
    decode: Sequence[Measurement], windows: Sequence[int], max_step_tokens: int
) -> list[Measurement]:
    """Return measurements of verification, at the middle length of every other batch size of a
    decode grid.

    Points with `batch * (window + 1)` above `max_step_tokens` are left out, because an engine would
    split them into several steps. So are windows for which fewer than two batch sizes remain.
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
    """Return measurements that draft the tokens of a verify grid. Their TP degree is 1, as drafters
    have none."""
    draft = {"kind": PointKind.DRAFT, "drafter": drafter, "tp_degree": 1}
    return [point.model_copy(update=draft) for point in verify]


def num_draft_windows(num_steps: int, window: int) -> int:
    """Return how many windows a draft model drafts one after the other for one point: at least 2,
    and about `num_steps` tokens together."""
    return max(2, num_steps // window)


def batches_up_to(max_batch: int) -> list[int]:
    """Return about ten batch sizes up to the largest one, included. Beyond 256 they double."""
    batches = [batch for batch in BATCHES if batch < max_batch]
    while batches and batches[-1] * 2 < max_batch:
        batches.append(batches[-1] * 2)
    return [*batches, max_batch]


def shuffled(points: Sequence[Measurement], seed: int) -> list[Measurement]:
    """Return the points in random order, so that a temporary slowdown of the machine affects all
    curves rather than one."""
    order = list(points)
    random.Random(seed).shuffle(order)
    return order
