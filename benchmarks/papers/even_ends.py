"""Prompts placed so that engines end together, by the lengths of the epoch before. Pure.

    longest first   | 20K 20K | 20K 16K 12K | ... | 900 800 ... 100 |       one engine each
    ends at         s 20K + c (tokens of all its responses)      <= T       the least T there is

An engine takes s seconds for a step whatever its batch, and c more for each request, so it ends s
times its longest response and c times its tokens after it began. Equal tokens (`deal_groups`) give
every engine one of the longest responses and a full batch beside it; here the longest have engines
with few others, and the short ones have large batches on the rest. Beyond the cuts between engines
nothing is decided; for a given T each takes as many of the prompts as end in time, the longest
first, so no split of that order has a smaller T.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from engines.latency.interface import Latency
from engines.simulate.cluster import Placement
from schemas.step import PromptGroup

_HALVINGS = 40


def step_requests_of(
    latency: Latency, tp_degree: int, batch: int, context_tokens_each: float, window: int
) -> float:
    """Requests whose share of a step takes as long as what a step takes without any, s / c, near
    this batch; `window`: draft tokens that a step verifies of each."""

    def seconds(num: int) -> float:
        return latency.verify_s(tp_degree, num, num * context_tokens_each, window)

    each_s = (seconds(2 * batch) - seconds(batch)) / batch
    return (seconds(batch) - batch * each_s) / each_s


def even_ends(step_requests: float, group_size: int) -> Placement:
    """`step_requests`: as of `step_requests_of`; a prompt has `group_size` responses."""

    def place(
        prompt_keys: Sequence[str], median_lengths: Mapping[str, float], num_engines: int
    ) -> tuple[PromptGroup, ...]:
        known = [median_lengths[key] for key in prompt_keys if key in median_lengths]
        typical = fmean(known) if known else 1.0
        lengths = {key: median_lengths.get(key, typical) for key in prompt_keys}
        keys = sorted(prompt_keys, key=lengths.__getitem__, reverse=True)
        shares = _least([lengths[key] for key in keys], num_engines, step_requests, group_size)
        return tuple(
            PromptGroup(prompt_key=key, engine=engine, expected_tokens=median_lengths.get(key))
            for key, engine in zip(keys, shares, strict=True)
        )

    return place


def _least(
    lengths: Sequence[float], num_engines: int, step_requests: float, group_size: int
) -> list[int]:
    """Engine of each prompt, these being from the longest, with the least end there is."""
    low = step_requests * lengths[0]
    high = low + group_size * sum(lengths)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        engines = _filled(lengths, middle, step_requests, group_size)
        low, high = (low, middle) if engines[-1] < num_engines else (middle, high)
    return _filled(lengths, high, step_requests, group_size)


def _filled(
    lengths: Sequence[float], end: float, step_requests: float, group_size: int
) -> list[int]:
    """Engine of each prompt, where each takes those that end by then, in units of c; one at
    least."""
    engines, longest, tokens = [], lengths[0], 0.0
    for length in lengths:
        own = group_size * length
        if tokens and step_requests * longest + tokens + own > end:
            engines.append(engines[-1] + 1)
            longest, tokens = length, own
        else:
            engines.append(engines[-1] if engines else 0)
            tokens += own
    return engines
