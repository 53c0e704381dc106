"""Prompts ranked by what their responses are expected to take (RhymeRL, section 6.2). Pure."""

import itertools
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from engines.histopipe.passes import TOKENS, ExpectedPasses
from schemas.rollout import LengthHistory


def rank_prompts(
    prompt_keys: Sequence[str],
    history: Mapping[str, LengthHistory],
    num_groups: int,
    expected: ExpectedPasses = TOKENS,
) -> list[list[str]]:
    """The prompts in ascending order of expected passes, divided as equally as possible.

    Expected are those of the median length of the last epoch ("the median lengths within each
    response group", 6.2). A prompt without history counts as the median of the known medians, the
    best guess there is: into the middle. Ties keep the order given. Group sizes differ by at most
    1, the longer groups being the larger ones; with fewer prompts than groups there are fewer
    groups.
    """
    assert num_groups > 0
    passes = expected.of(expected_tokens(prompt_keys, history))
    ranked = sorted(prompt_keys, key=passes.__getitem__)
    ends = np.cumsum([0, *divide_evenly(len(ranked), min(num_groups, len(ranked)))]).tolist()
    return [ranked[start:end] for start, end in itertools.pairwise(ends)]


def expected_tokens(
    prompt_keys: Sequence[str], history: Mapping[str, LengthHistory]
) -> dict[str, float]:
    """Expected tokens of a response to each of these prompts; without a history, the typical."""
    typical = typical_tokens(prompt_keys, history)
    return {k: history[k].median_tokens if k in history else typical for k in prompt_keys}


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
    """One for every four engines, from 2 to 16, never more than there are engines. The paper has
    16 for its math models and 8 for code."""
    assert num_engines > 0
    return min(num_engines, max(2, min(16, num_engines // 4)))
