"""Ranks prompts by the expected passes of their responses (RhymeRL, section 6.2). Pure."""

import itertools
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from refrain.engines.histopipe.passes import TOKENS, ExpectedPasses
from refrain.schemas.rollout import LengthHistory


def rank_prompts(
    prompt_keys: Sequence[str],
    history: Mapping[str, LengthHistory],
    num_groups: int,
    expected: ExpectedPasses = TOKENS,
) -> list[list[str]]:
    """Return the prompts in ascending order of expected passes, divided as evenly as possible.

    The passes are those of the last epoch's median length ("the median lengths within each response
    group", 6.2). A prompt without history gets the median of the known medians, so it lands in the
    middle. Ties keep the given order. Group sizes differ by at most 1, and the longer groups are
    larger. With fewer prompts than groups there are fewer groups.
    """
    assert num_groups > 0
    passes = expected.of(expected_tokens(prompt_keys, history))
    ranked = sorted(prompt_keys, key=passes.__getitem__)
    ends = np.cumsum([0, *divide_evenly(len(ranked), min(num_groups, len(ranked)))]).tolist()
    return [ranked[start:end] for start, end in itertools.pairwise(ends)]


def expected_tokens(
    prompt_keys: Sequence[str], history: Mapping[str, LengthHistory]
) -> dict[str, float]:
    """Return the expected response tokens of each prompt: its median, or the typical length."""
    typical = typical_tokens(prompt_keys, history)
    return {k: history[k].median_tokens if k in history else typical for k in prompt_keys}


def typical_tokens(prompt_keys: Sequence[str], history: Mapping[str, LengthHistory]) -> float:
    """Return the median of the known medians, or 1 if no prompt has a history."""
    known = [history[key].median_tokens for key in prompt_keys if key in history]
    return median(known) if known else 1.0


def context_rates(
    prompt_keys: Sequence[str], history: Mapping[str, LengthHistory]
) -> dict[str, float]:
    """Return the tokens by which the context of each prompt's responses grows for each sampled
    token: 1, and by history the share that the environment gives. A prompt without history gets the
    median of the others."""
    known = [history[key].context_per_token for key in prompt_keys if key in history]
    typical = median(known) if known else 1.0
    return {k: history[k].context_per_token if k in history else typical for k in prompt_keys}


def divide_evenly(total: int, num_parts: int) -> tuple[int, ...]:
    """Return sizes that differ by at most 1, larger ones last."""
    return tuple((total + part) // num_parts for part in range(num_parts))


def length_growth(history: Mapping[str, LengthHistory], minimum: float = 1.1) -> float:
    """Return alpha of section 6.3: the 75th percentile of "the growth rates in response lengths of
    the previous epoch", but at least `minimum`.

    A prompt's growth is its median over its median one epoch earlier. Prompts that were rolled out
    only once have none. Deviation: the paper does not say which lengths it compares.
    """
    growths = [
        lengths.median_tokens / lengths.previous_median_tokens
        for lengths in history.values()
        if lengths.previous_median_tokens
    ]
    return max(minimum, float(np.percentile(growths, 75))) if growths else minimum


def default_num_groups(num_engines: int) -> int:
    """Return one group for every four engines, from 2 to 16, but at most one per engine. The paper
    uses 16 for its math models and 8 for code."""
    assert num_engines > 0
    return min(num_engines, max(2, min(16, num_engines // 4)))
