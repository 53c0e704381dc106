"""Estimates how many tokens unfinished responses still have. Pure.

`Maximum` is Algorithm 1 of PAT: L_max - L_gen, "a conservative bound". `FromHistory` expects a
response to be as long as its prompt's responses in the last epoch, given that it is longer than
its tokens so far:

    ln L ~ Normal(ln m, s),   s = ln(longest / m) / xi_N       given L > g
    L_u  = m exp(s isf((1 - u) sf(z))),   z = ln(g / m) / s    its quantile u

m: the prompt's median, g: tokens so far, N: samples of a prompt, xi_N: the expected maximum of N
standard normals (Blom). Then:

- A response beyond the longest counts as the new longest, and s grows with it. Its remaining tokens
  are a share of its tokens so far, never 0.
- All medians and longest lengths are scaled by the growth of the medians, the median over prompts.
- A prompt without history has the spread of all prompts together. Without any history, the maximum
  counts.
- Requests get evenly spread quantiles, (rank + 1/2) / requests. With one quantile or the mean for
  all, they would end together: the forecast would have no tail and miss the gain of a switch. A
  single response gets its median.
- The n-th request's rank is that of frac(1/2 + n phi), with the golden ratio phi, so an estimate
  changes little when another response ends. Scenario s uses frac(1/2 + n phi + s): the same
  quantiles, for other requests.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

import numpy as np
from scipy.special import ndtr, ndtri

from refrain.schemas.rollout import LengthHistory, RequestId

MIN_SPREAD = 0.1
"""Least s. A prompt with equal lengths gets it. A tenth is a factor of 1.1."""
MAX_GROWTH = 2.0
"""Most that medians may grow or shrink from one epoch to the next, as a factor."""
_GOLDEN = (5**0.5 - 1) / 2


class Remaining(Protocol):
    """An estimate of the remaining tokens of all requests of a batch."""

    @property
    def is_known(self) -> bool:
        """Whether anything but the maximum length is known."""
        ...

    def tokens(
        self, generated: Mapping[RequestId, int], scenario: float = 0.0
    ) -> dict[RequestId, float]:
        """Return response tokens to come, at least 1. `generated`: tokens so far. `scenario`: in
        [0, 1), assigns the lengths to other requests; forecasts use 0 by default."""
        ...


class Maximum:
    """The estimate that every response reaches the maximum length (PAT, Algorithm 1)."""

    is_known = False

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: most tokens of a response."""
        self._max_tokens = max_tokens

    def tokens(
        self, generated: Mapping[RequestId, int], scenario: float = 0.0
    ) -> dict[RequestId, float]:
        del scenario
        return {id: max(1.0, float(self._max_tokens - num)) for id, num in generated.items()}


class FromHistory:
    """The estimate that responses are as long as their prompts' responses in the last epoch."""

    def __init__(
        self, history: Mapping[str, LengthHistory], max_tokens: int, *, group_size: int
    ) -> None:
        """`history`: last epoch's lengths by prompt. `group_size`: samples of each prompt."""
        self._maximum = Maximum(max_tokens)
        self._places: dict[RequestId, float] = {}
        """Fixed place of each request, in [0, 1). The order of places gives the quantiles."""
        # Blom's formula is within 1 % of the expected maximum of 8 and more, within 5 % of 2.
        num_samples = max(2, group_size)
        self._xi = float(ndtri((num_samples - 0.375) / (num_samples + 0.25)))
        growth = _growth(history)
        self._curves = {key: self._curve(lengths, growth) for key, lengths in history.items()}
        self._pooled = _pool(list(self._curves.values())) if history else None

    @property
    def is_known(self) -> bool:
        return self._pooled is not None

    def tokens(
        self, generated: Mapping[RequestId, int], scenario: float = 0.0
    ) -> dict[RequestId, float]:
        return self._at(generated, self._quantiles(generated, scenario))

    def medians(self, generated: Mapping[RequestId, int]) -> dict[RequestId, float]:
        """Return each request's median tokens to come. Use this to compare requests. For a batch
        forecast use `tokens`."""
        return self._at(generated, np.full(len(generated), 0.5))

    def _at(
        self, generated: Mapping[RequestId, int], quantiles: np.ndarray
    ) -> dict[RequestId, float]:
        most = self._maximum.tokens(generated)
        if self._pooled is None or not generated:
            return most
        curves = [self._curves.get(id.prompt_key, self._pooled) for id in generated]
        so_far = np.maximum(1.0, np.array(list(generated.values()), dtype=float))
        means, spreads = np.array(curves).T
        lengths = _conditional_lengths(np.log(so_far), means, spreads, self._xi, quantiles)
        estimates = np.clip(lengths - so_far, 1.0, list(most.values()))
        return dict(zip(generated, estimates.tolist(), strict=True))

    def _quantiles(self, requests: Collection[RequestId], scenario: float) -> np.ndarray:
        # Sorted, so that the same requests get long lengths whatever engine they are on.
        for id in sorted((id for id in requests if id not in self._places), key=_order):
            self._places[id] = (0.5 + len(self._places) * _GOLDEN) % 1.0
        places = [(self._places[id] + scenario) % 1.0 for id in requests]
        ranks = np.argsort(np.argsort(places))
        return (ranks + 0.5) / len(requests)

    def _curve(self, lengths: LengthHistory, growth: float) -> tuple[float, float]:
        """Return (ln m, s)."""
        median = max(1.0, lengths.median_tokens)
        spread = np.log(max(median, lengths.longest_tokens) / median) / self._xi
        return float(np.log(median * growth)), max(MIN_SPREAD, float(spread))


def _order(id: RequestId) -> tuple[int, str, int]:
    return id.step, id.prompt_key, id.sample_index


def _conditional_lengths(
    log_so_far: np.ndarray,
    means: np.ndarray,
    spreads: np.ndarray,
    xi: float,
    quantiles: np.ndarray,
) -> np.ndarray:
    spreads = np.maximum(spreads, (log_so_far - means) / xi)
    survival = ndtr(-(log_so_far - means) / spreads)
    return np.exp(means + spreads * -ndtri((1.0 - quantiles) * survival))


def _growth(history: Mapping[str, LengthHistory]) -> float:
    ratios = [
        lengths.median_tokens / lengths.previous_median_tokens
        for lengths in history.values()
        if lengths.previous_median_tokens
    ]
    return float(np.clip(np.median(ratios), 1 / MAX_GROWTH, MAX_GROWTH)) if ratios else 1.0


def _pool(curves: list[tuple[float, float]]) -> tuple[float, float]:
    """Return (ln m, s) of a prompt drawn at random: its own spread and the spread of prompts."""
    means, spreads = np.array(curves).T
    return float(means.mean()), float(np.sqrt(means.var() + np.square(spreads).mean()))
