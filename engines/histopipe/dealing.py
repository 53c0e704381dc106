"""Groups dealt over engines by expected length."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from engines.balance import longest_first
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

    def size(key: str) -> float:
        return median_lengths.get(key, typical)

    shares = longest_first(prompt_keys, size, num_engines)
    engine_of = {key: engine for engine, share in enumerate(shares) for key in share}
    return tuple(
        PromptGroup(prompt_key=key, engine=engine_of[key], expected_tokens=median_lengths.get(key))
        for key in sorted(prompt_keys, key=size, reverse=True)
    )
