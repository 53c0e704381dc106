"""Prompts ranked by the response lengths of their last epoch (RhymeRL, section 6.2). Pure."""

import itertools
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from schemas.rollout import LengthHistory


def rank_prompts(
    prompt_keys: Sequence[str], history: Mapping[str, LengthHistory], num_groups: int
) -> list[list[str]]:
    """The prompts in ascending order of expected length, divided as equally as possible.

    Expected is the median of the last epoch ("the median lengths within each response group",
    6.2). A prompt without history counts as the median of the known medians, the best guess there
    is: into the middle. Ties keep the order given. Group sizes differ by at most 1, the longer
    groups being the larger ones; with fewer prompts than groups there are fewer groups.
    """
    assert num_groups > 0
    typical = typical_tokens(prompt_keys, history)
    ranked = sorted(prompt_keys, key=lambda key: expected_tokens(key, history, typical))
    ends = np.cumsum([0, *divide_evenly(len(ranked), min(num_groups, len(ranked)))]).tolist()
    return [ranked[start:end] for start, end in itertools.pairwise(ends)]


def expected_tokens(key: str, history: Mapping[str, LengthHistory], typical: float) -> float:
    """Expected tokens of a response to this prompt; `typical` where it has no history."""
    return history[key].median_tokens if key in history else typical


def typical_tokens(prompt_keys: Sequence[str], history: Mapping[str, LengthHistory]) -> float:
    """Median of the known medians; 1 when none of the prompts has a history."""
    known = [history[key].median_tokens for key in prompt_keys if key in history]
    return median(known) if known else 1.0


def divide_evenly(total: int, num_parts: int) -> tuple[int, ...]:
    """Parts that differ by at most 1, the larger ones last."""
    return tuple((total + part) // num_parts for part in range(num_parts))


def length_growth(history: Mapping[str, LengthHistory], minimum: float = 1.1) -> float:
    """alpha of section 6.3: the 75th percentile of "the growth rates in response lengths of the
    previous epoch", and at least the minimum.

    A prompt's growth is its median over its median one epoch before; prompts that were rolled out
    only once have none. Deviation: the paper does not say of which lengths the growth is taken.
    """
    growths = [
        lengths.median_tokens / lengths.previous_median_tokens
        for lengths in history.values()
        if lengths.previous_median_tokens
    ]
    return max(minimum, float(np.percentile(growths, 75))) if growths else minimum


def default_num_groups(num_engines: int) -> int:
    """One for every four engines, from 2 to 16 (the paper evaluates 8 and 16), never more than
    there are engines."""
    assert num_engines > 0
    return min(num_engines, max(2, min(16, num_engines // 4)))
