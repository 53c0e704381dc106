"""Compares epochs: text that returns in responses, and ranks of their lengths. Pure.

RhymeRL, section 5.1 (figure 6), 5.4 (figure 8), 6.1 (figure 9) and the table of 6.3.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int32, Int64
from numba import int32, int64, njit
from scipy.stats import rankdata

from refrain.engines.histopipe.ranking import length_growth, rank_prompts
from refrain.schemas.rollout import LengthHistory

PREFIX = 3
"""Tokens that must match to find a place in the last epoch's responses (5.1)."""
LAST_SHARE = 0.1
"""Share of a ranking group's responses that count as its last ones (6.3)."""
GROWN = 1.5
"""Factor over the last epoch's median length from which a prompt counts as grown."""
QUANTILES = (0.05, 0.5, 0.95, 0.99, 1.0)
_TOKENS = 1 << 21
"""Above the size of any vocabulary, so that three tokens fit into one number."""

Responses = Mapping[str, Sequence[np.ndarray]]
"""Token ids of each prompt's responses in one epoch, int32 [response]."""
Lengths = Mapping[str, Sequence[int]]
"""Response tokens of each prompt's responses in one epoch."""


@dataclass(frozen=True, slots=True)
class Similarity:
    """Share of an epoch's responses that the last epoch's responses to the same prompts contain."""

    epoch: int
    num_tokens: int
    rates: np.ndarray
    """Share of each response's tokens that were found, float64 [responses]."""
    segments: np.ndarray
    """Tokens of each found stretch, int64 [stretches]."""

    @property
    def share(self) -> float:
        """Share of all tokens that were found."""
        return int(self.segments.sum()) / self.num_tokens if self.num_tokens else 0.0


@dataclass(frozen=True, slots=True)
class RankChanges:
    """An epoch's responses compared with the last epoch's ranking groups. The four shares add up to
    1."""

    epoch: int
    num_groups: int
    accurate: float
    """Not longer than the longest response of the group's prompts."""
    not_last: float
    """Longer, but not among the last of the group to end."""
    within: float
    """Among the last, but at most alpha times the longest."""
    outgrown: float
    """Among the last and longer than that. HistoPipe would move them."""


@dataclass(frozen=True, slots=True)
class LengthChanges:
    """Lengths of an epoch's responses, and change of the prompts' medians since the last epoch."""

    epoch: int
    tokens: tuple[float, ...]
    """Response tokens at `QUANTILES`."""
    rank_correlation: float | None
    """Spearman's, of the medians. None without two prompts that differ in both epochs."""
    grown: float | None
    """Share of prompts whose median is at least `GROWN` times the last one."""
    shrunk: float | None
    """Share of prompts whose last median is at least `GROWN` times this one."""


def similarity(epoch: int, now: Responses, before: Responses) -> Similarity:
    """Return the similarity of an epoch to the last one, as section 5.1 counts it.

    At each place, find the last three tokens in the last epoch's responses to the prompt. Tokens
    that continue equally are found. Deviation: the paper does not say which of several matches
    counts; here it is the longest.
    """
    rates, found, num_tokens = [], [np.empty(0, np.int64)], 0
    for key in sorted(now.keys() & before.keys()):
        history = _History(before[key])
        for response in now[key]:
            segments = history.segments(response)
            found.append(segments)
            rates.append(segments.sum() / max(1, len(response)))
            num_tokens += len(response)
    return Similarity(epoch, num_tokens, np.asarray(rates), np.concatenate(found))


def rank_changes(
    epoch: int, num_groups: int, now: Lengths, before: Lengths, earlier: Lengths
) -> RankChanges:
    """Compare responses with the ranking groups of the last epoch. `earlier`, the epoch before
    that, gives alpha.

    Deviations: groups hold all prompts of an epoch, not of a step. The longest responses are taken
    to end last.
    """
    history = {
        key: LengthHistory(
            float(np.median(before[key])),
            max(before[key]),
            float(np.median(earlier[key])) if key in earlier else None,
        )
        for key in sorted(now.keys() & before.keys())
    }
    alpha, counts = length_growth(history), np.zeros(4, np.int64)
    for keys in rank_prompts(list(history), history, num_groups) if history else ():
        lengths = sorted(length for key in keys for length in now[key])
        longest = max(history[key].longest_tokens for key in keys)
        num_last = math.ceil(LAST_SHARE * len(lengths))
        for i, length in enumerate(lengths):
            if length <= longest:
                counts[0] += 1
            elif i < len(lengths) - num_last:
                counts[1] += 1
            else:
                counts[2 if length <= alpha * longest else 3] += 1
    shares = (counts / max(1, counts.sum())).tolist()
    return RankChanges(epoch, num_groups, *shares)


def length_changes(epoch: int, now: Lengths, before: Lengths) -> LengthChanges:
    """Compare the lengths of an epoch with the epoch before. The first epoch has its own only."""
    lengths = np.concatenate([np.asarray(own) for own in now.values()])
    tokens = tuple(np.quantile(lengths, QUANTILES).tolist())
    keys = sorted(now.keys() & before.keys())
    if not keys:
        return LengthChanges(epoch, tokens, None, None, None)
    medians = np.array([[np.median(one[key]) for key in keys] for one in (before, now)])
    growth = medians[1] / np.maximum(1.0, medians[0])
    return LengthChanges(
        epoch,
        tokens,
        _rank_correlation(*medians),
        float(np.mean(growth >= GROWN)),
        float(np.mean(growth <= 1 / GROWN)),
    )


def _rank_correlation(
    one: Float64[np.ndarray, "prompts"], other: Float64[np.ndarray, "prompts"]
) -> float | None:
    ranks = rankdata([one, other], axis=1)
    return float(np.corrcoef(ranks)[0, 1]) if ranks.std(axis=1).all() else None


class _History:
    """Responses of one prompt, searchable by three tokens."""

    def __init__(self, responses: Sequence[np.ndarray]) -> None:
        ends = [np.array([-1 - i], np.int32) for i in range(len(responses))]
        parts = [part for pair in zip(responses, ends, strict=True) for part in pair]
        self._text = np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32)
        codes = _codes(self._text)
        order = np.argsort(codes, kind="stable")
        self._codes, self._starts = codes[order], order + PREFIX

    def segments(self, response: np.ndarray) -> Int64[np.ndarray, "stretches"]:
        """Return the tokens of each stretch of the response that these responses contain."""
        tokens = np.array(response, np.int32)  # Arrow's cannot be written to.
        codes = _codes(tokens)
        first = np.searchsorted(self._codes, codes, "left")
        last = np.searchsorted(self._codes, codes, "right")
        return _segments(tokens, self._text, first, last, self._starts)


def _codes(tokens: Int32[np.ndarray, "n"]) -> Int64[np.ndarray, "n_minus_2"]:
    """Return a number for each three tokens in a row. -1 across the end of a response."""
    wide = tokens.astype(np.int64)
    a, b, c = wide[:-2], wide[1:-1], wide[2:]
    return np.where((a < 0) | (b < 0) | (c < 0), -1, (a * _TOKENS + b) * _TOKENS + c)


@njit(int64[::1](int32[::1], int32[::1], int64[::1], int64[::1], int64[::1]), cache=True)
def _segments(
    tokens: np.ndarray, text: np.ndarray, first: np.ndarray, last: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    n, at, num = len(tokens), 3, 0
    found = np.empty(n, np.int64)
    while at < n:
        best = 0
        for i in range(first[at - 3], last[at - 3]):
            start, length = starts[i], 0
            while (
                at + length < n
                and start + length < len(text)
                and text[start + length] == tokens[at + length]
            ):
                length += 1
            best = max(best, length)
        if best:
            found[num] = best
            num += 1
        at += max(1, best)
    return found[:num].copy()
