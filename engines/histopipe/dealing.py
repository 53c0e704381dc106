"""Groups dealt over engines by expected length."""

import heapq
from collections.abc import Mapping, Sequence
from statistics import fmean

from schemas.step import PromptGroup


def deal_groups(
    prompt_keys: Sequence[str], median_lengths: Mapping[str, float], num_engines: int
) -> tuple[PromptGroup, ...]:
    """Longest expected group first, each to the engine with the least expected work so far.

    This is longest-processing-time-first scheduling (Graham, 1969, at most 4/3 of the optimum).
    `median_lengths` holds the median response tokens of prompts that were answered before; a prompt
    without one is taken to be of mean length. Groups stay whole, so that the samples of a prompt
    share its prefix. Ties keep the order given.
    """
    assert num_engines > 0
    known = [median_lengths[key] for key in prompt_keys if key in median_lengths]
    typical = fmean(known) if known else 1.0
    ranked = sorted(prompt_keys, key=lambda key: -median_lengths.get(key, typical))
    load = [(0.0, engine) for engine in range(num_engines)]
    groups = []
    for key in ranked:
        tokens, engine = heapq.heappop(load)
        groups.append(
            PromptGroup(prompt_key=key, engine=engine, expected_tokens=median_lengths.get(key))
        )
        heapq.heappush(load, (tokens + median_lengths.get(key, typical), engine))
    return tuple(groups)
