"""Speed-up of drafting over (batch, acceptance): where it pays.

    speedup(w, p) = E[tokens] * decode_s / (verify_s + draft_s),  E[tokens] = 1 + p + ... + p^w

for a draft window w and a probability p that a draft token is accepted, each independently of the
others. A verification yields the accepted prefix and one token more, as the token at the first
mismatch is the model's own (RhymeRL 5.4; SpecActor 4.1, P(a, w)).

Deviation: SpecActor's tau_w counts (a + 1) / 2 tokens for a partial and w for a full acceptance, an
estimate for decoupled drafting, where tokens drafted ahead are lost. Here drafting and verification
take turns, nothing runs ahead, and the bonus token is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engines.latency.interface import Latency


class Choice(NamedTuple):
    """A draft window and what it brings."""

    window: int
    """Draft tokens per verification; 0: do not draft."""
    speedup: float
    """Speed-up over decoding; 1.0 at window 0."""


def expected_tokens(window: int, acceptance: float) -> float:
    """Tokens per verification, bonus token included: 1 + p + ... + p^w."""
    if window < 0 or not 0.0 <= acceptance <= 1.0:
        raise ValueError(f"window {window} must be >= 0 and acceptance {acceptance} in [0, 1]")
    return float(sum(acceptance**k for k in range(window + 1)))


@dataclass(frozen=True, slots=True)
class Drafting:
    """One drafter on one engine layout, at a typical context per sequence."""

    latency: Latency
    tp_degree: int
    drafter: str
    context_tokens_each: float
    """Mean context of one sequence, in tokens."""
    max_window: int = 32

    def speedup(self, batch: int, acceptance: float, window: int) -> float:
        """Tokens per second with this window over tokens per second without drafting."""
        return expected_tokens(window, acceptance) * self._time_ratio(batch, window)

    def best_window(self, batch: int, acceptance: float) -> Choice:
        """The fastest window; the smaller of two equal ones, so 0 unless drafting pays."""
        return max(
            (Choice(w, self.speedup(batch, acceptance, w)) for w in range(self.max_window + 1)),
            key=lambda choice: choice.speedup,
        )

    def pays(self, batch: int, acceptance: float, min_speedup: float = 1.0) -> bool:
        """Whether some window is faster than decoding by more than `min_speedup`."""
        return self.best_window(batch, acceptance).speedup > min_speedup

    def _time_ratio(self, batch: int, window: int) -> float:
        """Time of a decoding step over the time of drafting and verifying `window` tokens."""
        if window == 0:
            return 1.0
        context_tokens = batch * self.context_tokens_each
        decode_s = self.latency.decode_s(self.tp_degree, batch, context_tokens)
        verify_s = self.latency.verify_s(self.tp_degree, batch, context_tokens, window)
        return decode_s / (verify_s + self.latency.draft_s(self.drafter, batch, window))


@dataclass(frozen=True, slots=True)
class SpeedupSurface:
    """Best window and its speed-up over a grid, computed once (RhymeRL 5.4, pre-profiling)."""

    batches: tuple[int, ...]
    """Batch sizes, ascending."""
    acceptances: tuple[float, ...]
    """Acceptances, ascending, in [0, 1]."""
    windows: np.ndarray
    """Best windows; [num_batches, num_acceptances]."""
    speedups: np.ndarray
    """Speed-ups of the best windows; [num_batches, num_acceptances], at least 1.0 as window 0 is
    among the choices."""

    @classmethod
    def compute(
        cls, drafting: Drafting, batches: Sequence[int], acceptances: Sequence[float]
    ) -> "SpeedupSurface":
        if not batches or not acceptances:
            raise ValueError("a speed-up surface needs at least one batch and one acceptance")
        batches, acceptances = sorted(batches), sorted(acceptances)
        choices = np.array([[drafting.best_window(b, p) for p in acceptances] for b in batches])
        return cls(
            batches=tuple(batches),
            acceptances=tuple(acceptances),
            windows=choices[..., 0].astype(int),
            speedups=choices[..., 1],
        )

    def max_paying_batch(self, acceptance: float, min_speedup: float = 1.0) -> int:
        """Largest batch of the grid up to which drafting pays; 0 where it pays nowhere.

        The acceptance is rounded down to the grid, so that the answer is not optimistic.
        """
        column = int(np.searchsorted(self.acceptances, acceptance, side="right")) - 1
        if column < 0:
            return 0
        paying = self.speedups[:, column] > min_speedup
        num_paying = len(paying) if paying.all() else int(np.argmin(paying))
        return self.batches[num_paying - 1] if num_paying else 0
