"""Expected response lengths of a step's groups: by history, and by what siblings show. Pure.

    log length of a sample = log length of its group + noise

    before the step    the group's median of last time, times the growth of the data set
    in the step        finished siblings, and running ones that have outgrown the expectation

Both are combined as in normal regression: the history weighs as much as (noise / drift)^2 siblings.
A prompt without history has the median of the others, and their spread in place of the drift.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, pstdev

from refrain.engines.histopipe.ranking import context_rates
from refrain.schemas.rollout import LengthHistory

LEAST_SPREAD = 0.05
"""Least standard deviation of log lengths, so that no evidence counts as certain."""
MARGIN_SPREADS = 0.5
"""Standard deviations within a group by which an engine's longest sample may exceed the
expectation. Few samples of a batch are so long, and the others end before them."""
OUTGROWN_MEDIANS = 2.0
"""Tokens in which an engine's longest sample should end once it has outgrown the expectation, in
times what half of such samples need. Without memory, three in four end in two medians."""
DEFERRED_MEDIANS = 9.0
"""The same for deferred samples: all but one in 500 end in nine medians. They are few, but a step
cannot defer them again, so it waits for the last one."""
UNKNOWN_SPREAD = 0.5
"""Standard deviations of log lengths where the history has none."""


@dataclass(slots=True)
class _Group:
    prior: float
    """Expected log length by history."""
    prior_weight: float
    """Siblings that the history counts as."""
    sum_logs: float = 0.0
    num_seen: int = 0
    tokens: float = 0.0
    """Expected tokens."""

    def __post_init__(self) -> None:
        self.add(0.0, 0)

    def add(self, log: float, num: int = 1) -> None:
        self.sum_logs += log
        self.num_seen += num
        total = self.prior_weight * self.prior + self.sum_logs
        self.tokens = math.exp(total / (self.prior_weight + self.num_seen))


class GroupLengths:
    """Expected response tokens of each group of a step."""

    def __init__(
        self,
        prompt_keys: Sequence[str],
        history: Mapping[str, LengthHistory],
        group_size: int,
        max_response_tokens: int,
        typical_tokens: float = 1.0,
    ) -> None:
        """`typical_tokens`: prior of every prompt while none has a history."""
        known = [history[key] for key in prompt_keys if key in history]
        logs = [math.log(max(1.0, of.median_tokens)) for of in known]
        typical = median(logs) if logs else math.log(max(1.0, typical_tokens))
        growths = [
            math.log(max(1.0, of.median_tokens) / of.previous_median_tokens)
            for of in known
            if of.previous_median_tokens
        ]
        self.growth = median(growths) if growths else 0.0
        """Growth of log lengths since last time."""
        self.drift = _spread([growth - self.growth for growth in growths])
        """Standard deviation of the growth over groups."""
        self.noise = _noise(known, group_size)
        """Standard deviation of log lengths within a group."""
        self.margin = math.exp(MARGIN_SPREADS * self.noise)
        """Factor of the longest of some samples over the expectation."""
        typical_wait_s = median(of.mean_wait_s for of in known) if known else 0.0
        self._waits_s = {
            key: history[key].mean_wait_s if key in history else typical_wait_s
            for key in prompt_keys
        }
        self._context_rates = context_rates(prompt_keys, history)
        self._max_tokens = float(max_response_tokens)
        self._unknown = _Group(min(typical, math.log(self._max_tokens)), 1.0)
        weights = {True: (self.noise / self.drift) ** 2, False: (self.noise / _spread(logs)) ** 2}
        self._groups = {}
        for key in prompt_keys:
            of = history.get(key)
            prior = math.log(max(1.0, of.median_tokens)) if of else typical
            prior = min(prior + self.growth, math.log(self._max_tokens))
            self._groups[key] = _Group(prior, weights[of is not None])

    def tokens(self, prompt_key: str) -> float:
        """Return the expected response tokens of one more sample."""
        return self._groups[prompt_key].tokens

    def wait_s(self, prompt_key: str) -> float:
        """Return the expected seconds in which a sample waits for its environment. Unknown groups
        do not wait."""
        return self._waits_s.get(prompt_key, 0.0)

    def context_per_token(self, prompt_key: str) -> float:
        """Return the tokens by which a sample's context grows for each token that it samples. In
        unknown groups, environments give none."""
        return self._context_rates.get(prompt_key, 1.0)

    def observed_tokens(self, prompt_key: str) -> float:
        """Return the tokens that the environment should give to one more sample."""
        return self.tokens(prompt_key) * (self.context_per_token(prompt_key) - 1.0)

    def add(self, prompt_key: str, num_tokens: int) -> None:
        """Add the length of a sample of the step that has finished."""
        self._groups[prompt_key].add(math.log(max(1, num_tokens)))

    def remaining(self, prompt_key: str, num_tokens: int) -> float:
        """Return the expected tokens to come of a sample with so many. An unknown group counts as
        a typical one."""
        group = self._groups.get(prompt_key, self._unknown)
        spread = self.noise if group.num_seen else math.hypot(self.noise, self.drift)
        # Of the samples that get this far, half end within about so much more.
        to_come = max(group.tokens - num_tokens, spread * num_tokens, 1.0)
        return max(1.0, min(to_come, self._max_tokens - num_tokens))

    def most_remaining(self, prompt_key: str, num_tokens: int, *, deferred: bool = False) -> float:
        """Return the tokens to come of a sample if it is rather long for its group."""
        outgrown = num_tokens > self._groups.get(prompt_key, self._unknown).tokens
        margin = OUTGROWN_MEDIANS if outgrown else self.margin
        margin *= DEFERRED_MEDIANS if deferred else 1.0
        expected = self.remaining(prompt_key, num_tokens)
        return min(margin * expected, max(1.0, self._max_tokens - num_tokens))


def _spread(values: list[float]) -> float:
    return max(LEAST_SPREAD, pstdev(values)) if len(values) > 1 else UNKNOWN_SPREAD


def _noise(known: list[LengthHistory], group_size: int) -> float:
    """Return the spread within groups, from each group's longest response over its median."""
    if group_size < 2 or not known:
        return UNKNOWN_SPREAD
    # Blom's approximation of the largest of so many standard normal values.
    largest = NormalDist().inv_cdf((group_size - 0.375) / (group_size + 0.25))
    logs = [math.log(max(1.0, of.longest_tokens / max(1.0, of.median_tokens))) for of in known]
    return max(LEAST_SPREAD, fmean(logs) / largest)
