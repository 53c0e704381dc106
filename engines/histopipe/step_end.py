"""How long an engine should take for its part of a step. Pure.

    short     the longest samples need engines almost alone: engines do less in a second
    long      large batches: engines do more in a second, but later steps wait longer

A step may begin when the version `staleness` before its own is trained. So with period P

    rollout + train_s = (staleness + 1) P         and         busy(rollout) = engines P,

where `busy` is the engine-seconds that the step takes. Engines take samples longest first. One
whose longest sample has n tokens runs so many beside it that n tokens take the whole rollout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refrain.engines.latency.interface import Latency

CONTEXTS = (0.0, 1024.0, 4096.0, 16384.0, 65536.0)
"""Context tokens of a request between which times are interpolated."""
EFFICIENCY = 0.9
"""Share of an engine's time in which it does as forecast. In the rest it prefills, loads weights,
waits, or runs fewer requests than it has room for."""
_HALVINGS = 24


class TokenTimes:
    """Seconds in which every request of a batch gains a token, from a latency model."""

    def __init__(self, latency: Latency, tp_degree: int, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
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


@dataclass(frozen=True, slots=True)
class StepPace:
    """How a run's steps follow each other."""

    times: TokenTimes
    num_engines: int
    staleness: int
    """Versions between the one that generates and the one that is trained. 0: on-policy."""
    train_s: float
    """Expected seconds in which a step is trained."""

    def rollout_s(self, lengths: Sequence[float], prompt_tokens: float) -> float:
        """Return the seconds that an engine should take for its part of each step.

        `lengths`: expected response tokens of every sample. `prompt_tokens`: mean of a prompt,
        and of what environments give.
        """
        ordered = np.sort(np.asarray(lengths, dtype=float))[::-1]

        def fits(seconds: float) -> bool:
            # On-policy, engines have nothing to do while the trainer trains.
            period = (seconds + self.train_s) / (self.staleness + 1) if self.staleness else seconds
            busy = busy_s(self.times, ordered, seconds, prompt_tokens)
            return busy <= EFFICIENCY * self.num_engines * period

        low, high = 0.0, 1.0
        while not fits(high):
            low, high = high, 2 * high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        # The trainer takes at most one step in `train_s`, so an earlier end gains nothing.
        return max(high, self.staleness * self.train_s)
