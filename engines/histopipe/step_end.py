"""When a step should end whose samples wait in one queue. Pure.

    end early     the longest samples need engines almost alone: engines do less in a second
    end late      large batches: engines do more in a second, but later steps wait longer

A step may begin when the version `staleness` before its own is trained. So with period P

    rollout + train_s = (staleness + 1) P         and         busy(rollout) = engines P,

where `busy` is the engine-seconds that the step takes. Engines take samples longest first. One
whose longest sample has n tokens runs so many beside it that n tokens take the whole rollout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.latency.interface import Latency

CONTEXTS = (0.0, 1024.0, 4096.0, 16384.0, 65536.0)
"""Context tokens of a request between which times are interpolated."""
REGULAR = True
EFFICIENCY = 0.85
"""Share of an engine's time in which it does as forecast. In the rest it prefills, loads weights,
waits, or runs fewer requests than it has room for."""
LEAST_SHARE = 0.8
"""Least share of the planned seconds that a step gets when it begins late."""
_HALVINGS = 24


class TokenTimes:
    """Seconds in which every request of a batch gains a token, from a latency model."""

    def __init__(self, latency: Latency, tp_degree: int, max_num_seqs: int) -> None:
        sizes = {1, max_num_seqs, *(int(1.25**n) for n in range(1, 64) if 1.25**n < max_num_seqs)}
        self._batches = np.array(sorted(sizes), dtype=float)
        self._table_BC = np.array(
            [
                [latency.decode_s(tp_degree, n, max(1.0, n * each)) for each in CONTEXTS]
                for n in sorted(sizes)
            ]
        )

    def batch_within(self, limit_s: float, context_tokens: float) -> float:
        """Return the largest batch of requests with so much context in which a token takes at most
        so long. 0 if a request takes longer even alone."""
        seconds_B = self._at(context_tokens)
        if seconds_B[0] > limit_s:
            return 0.0
        return float(np.interp(limit_s, np.maximum.accumulate(seconds_B), self._batches))

    def token_s(self, batch: float, context_tokens: float) -> float:
        return float(np.interp(batch, self._batches, self._at(context_tokens)))

    def _at(self, context_tokens: float) -> np.ndarray:
        place = float(np.interp(context_tokens, CONTEXTS, np.arange(len(CONTEXTS))))
        low = min(int(place), len(CONTEXTS) - 2)
        share = place - low
        return (1 - share) * self._table_BC[:, low] + share * self._table_BC[:, low + 1]


def busy_s(times: TokenTimes, lengths: np.ndarray, rollout_s: float, prompt_tokens: float) -> float:
    """Return the engine-seconds of a step that ends after `rollout_s`; infinite if it cannot.

    `lengths`: response tokens of every sample, longest first.
    """
    totals = np.concatenate(([0.0], np.cumsum(lengths)))
    first, busy = 0, 0.0
    while first < len(lengths):
        longest = float(lengths[first])
        context = prompt_tokens + longest / 2
        batch = times.batch_within(rollout_s / longest, context)
        if batch < 1.0:
            return math.inf
        done = rollout_s / times.token_s(batch, context) * batch
        stop = int(np.searchsorted(totals, totals[first] + done, side="right")) - 1
        stop = max(stop, first + 1)
        busy += rollout_s * min(1.0, (totals[min(stop, len(lengths))] - totals[first]) / done)
        first = stop
    return busy


@dataclass(slots=True)
class Pace:
    """Ends of a run's steps. One object serves all of them."""

    times: TokenTimes
    num_engines: int
    staleness: int
    """Versions between the one that generates and the one that is trained. 0: on-policy."""
    train_s: float
    """Expected seconds in which a step is trained."""
    last_end_s: float = -math.inf
    """When the step before should end."""

    def plan(self, lengths: Sequence[float], prompt_tokens: float, now_s: float) -> float:
        """Return when a step that begins now should end, and note it.

        Steps end at equal distances. Otherwise the rollouts of two steps may run at the same time,
        and engines idle while both are trained.
        """
        ordered = np.sort(np.asarray(lengths, dtype=float))[::-1]
        seconds = self.rollout_s(ordered, prompt_tokens)
        period = self.period_s(seconds)
        if not REGULAR or self.last_end_s == -math.inf:
            self.last_end_s = now_s + seconds
            return self.last_end_s
        self.last_end_s = max(now_s + LEAST_SHARE * seconds, min(now_s + 1.5*seconds,self.last_end_s + period))
        return self.last_end_s

    def delay(self, lengths: np.ndarray, prompt_tokens: float, now_s: float) -> float:
        """Return the earliest end of waiting samples, at least the planned one, and note it.
        `lengths`: longest first."""
        seconds = max(0.1, self.last_end_s - now_s)
        while not self._fits(lengths, prompt_tokens, seconds, seconds):
            seconds *= 1.05
        self.last_end_s = max(self.last_end_s, now_s + seconds)
        return self.last_end_s

    def period_s(self, rollout_s: float) -> float:
        """Return the seconds from the end of a step to the next."""
        return (rollout_s + self.train_s) / (self.staleness + 1)

    def rollout_s(self, lengths: np.ndarray, prompt_tokens: float) -> float:
        """Return the seconds that the rollouts of each step should take in the long run."""

        def fits(seconds: float) -> bool:
            # On-policy, engines have nothing to do while the trainer trains.
            period = self.period_s(seconds) if self.staleness else seconds
            return self._fits(lengths, prompt_tokens, seconds, period)

        low, high = 0.0, 1.0
        while not fits(high):
            low, high = high, 2 * high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        # The trainer takes no more than one step in `train_s`.
        return max(high, self.staleness * self.train_s)

    def _fits(
        self, lengths: np.ndarray, prompt_tokens: float, seconds: float, period: float
    ) -> bool:
        busy = busy_s(self.times, lengths, seconds, prompt_tokens)
        return busy <= EFFICIENCY * self.num_engines * period
