"""The draft ladder: which drafter is the fastest (SpecActor, section 4.2, figure 10). Pure.

    acceptance of the last steps ──①──► each drafter's rung ──②──► the largest speed-up, if > 1

A rung gives a drafter's speed-up over plain decoding with the best window, by batch and by p, the
probability that a draft token is accepted. It comes from the latency model alone, so from offline
profiling (RhymeRL 5.4, pre-profiling). It needs neither the policy nor its texts. Drafting and
verification take turns:

    speedup(w, p) = E[tokens] * decode_s / (verify_s + draft_s),  E[tokens] = 1 + p + ... + p^w

p is measured from the tokens that verifications look at: the accepted ones and, if a verification
stops early, the rejected one. So p = accepted / (accepted + rejections), whatever the lengths of
the drafts (`DraftProgress.acceptance`). The acceptance rate is a different figure, accepted over
drafted tokens. It depends on the window, because the k-th token of w is accepted with probability
p^k:

    rate = (p + p^2 + ... + p^w) / w

`token_acceptance` inverts this if only the rate is known. The paper uses one word for both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq

from engines.latency.drafting_pace import Pace, decoupled_paces, draft_s, pace
from engines.latency.expectation import expected_tokens
from engines.latency.forecast import step_s
from engines.latency.interface import Latency
from schemas.rollout import DraftProgress, DraftSetting

NEAR = 0.01
"""Share by which a chosen setting may be slower than the fastest."""


def acceptance_rate(window: int, acceptance: float) -> float:
    """Return the mean of accepted over drafted tokens with this window."""
    if window < 1:
        raise ValueError(f"a window of {window} tokens has no acceptance rate")
    return (expected_tokens(window, acceptance) - 1) / window


@lru_cache(maxsize=4096)
def token_acceptance(window: int, rate: float) -> float:
    """Return the probability p that gives this acceptance rate with this window."""
    if window < 1 or not 0.0 <= rate <= 1.0:
        raise ValueError(f"window {window} must be >= 1 and acceptance rate {rate} in [0, 1]")
    return float(brentq(lambda p: acceptance_rate(window, p) - rate, 0.0, 1.0))


def request_acceptance(drafting: DraftProgress | None) -> float | None:
    """Return the probability p of one request, or None until something is verified. Rounded to two
    digits, so that lookups hit the cache; a request cannot measure it more precisely."""
    if drafting is None or drafting.setting is None or drafting.acceptance is None:
        return None
    return round(drafting.acceptance, 2)


class Choice(NamedTuple):
    """A draft window with its speed-up."""

    window: int
    """Draft tokens per verification. 0: do not draft."""
    speedup: float
    """Speed-up over decoding. 1.0 at window 0."""


@dataclass(frozen=True, slots=True)
class SpeedupSurface:
    """Speed-ups of the best windows over a grid."""

    batches: tuple[int, ...]
    """Batch sizes, ascending."""
    acceptances: tuple[float, ...]
    """Acceptances, ascending, in [0, 1]."""
    speedups: np.ndarray
    """[num_batches, num_acceptances], at least 1.0 because window 0 is a choice."""

    def max_paying_batch(self, acceptance: float) -> int:
        """Return the largest batch of the grid up to which drafting pays, or 0 if it never pays.

        The acceptance is rounded down to the grid, so the result is not optimistic.
        """
        column = int(np.searchsorted(self.acceptances, acceptance, side="right")) - 1
        if column < 0:
            return 0
        num_paying = int(np.logical_and.accumulate(self.speedups[:, column] > 1.0).sum())
        return self.batches[num_paying - 1] if num_paying else 0


@dataclass(frozen=True, slots=True)
class Ladder:
    """Drafters on one engine layout, at a typical context per sequence."""

    latency: Latency
    tp_degree: int
    drafters: tuple[str, ...]
    context_tokens_each: float
    """Mean context of one sequence, in tokens."""
    max_window: int = 32

    def pace(
        self,
        setting: DraftSetting,
        acceptance: float,
        batch: int = 1,
        context_tokens_each: float | None = None,
    ) -> Pace:
        """Return the pace of one request in a batch of requests like it.

        `context_tokens_each`: mean context of a request. None: the ladder's.
        """
        drafting_s = draft_s(self.latency, setting, batch)
        verify_s = self._verify_s(batch, context_tokens_each)
        return pace((setting, acceptance), drafting_s, verify_s)

    def speedup(self, drafter: str, acceptance: float, batch: int, window: int) -> float:
        """Return tokens per second with this window over tokens per second without drafts."""
        if window == 0:
            return 1.0
        found = self.pace(DraftSetting(drafter, window), acceptance, batch)
        return found.tokens * (self._verify_s(batch)(0) / found.step_s)

    def best(self, drafter: str, acceptance: float, batch: int) -> Choice:
        """Return the fastest window. In a tie, return the smaller, so 0 unless drafting pays."""
        windows = range(self.max_window + 1)
        choices = (Choice(w, self.speedup(drafter, acceptance, batch, w)) for w in windows)
        return max(choices, key=lambda choice: choice.speedup)

    def best_setting(
        self,
        drafter: str,
        acceptance: float,
        batch: int = 1,
        context_tokens_each: float | None = None,
        *,
        coupled: bool | None = None,
    ) -> DraftSetting:
        """Return the shortest window that is nearly the fastest (`NEAR`), coupled if one such is.

        The arguments are those of `pace`. `coupled`: the mode. None: choose it.
        """
        paces: dict[DraftSetting, Pace] = {}
        if coupled is not False:
            in_turn = (DraftSetting(drafter, w) for w in range(1, self.max_window + 1))
            at = acceptance, batch, context_tokens_each
            paces |= {setting: self.pace(setting, *at) for setting in in_turn}
        if not coupled:
            token_s = self.latency.draft_s(drafter, batch, 1)
            verify_s = self._verify_s(batch, context_tokens_each)
            paces |= decoupled_paces(drafter, acceptance, token_s, verify_s, self.max_window)
        enough = max(of.tokens_per_s for of in paces.values()) / (1.0 + NEAR)
        return next(setting for setting, of in paces.items() if of.tokens_per_s >= enough)

    def surfaces(
        self, batches: Sequence[int], acceptances: Sequence[float]
    ) -> dict[str, SpeedupSurface]:
        """Return every rung over a grid, by drafter (figure 10 a). Both axes must ascend."""
        surfaces = {}
        for drafter in self.drafters:
            best = [
                [self.best(drafter, p, batch).speedup for p in acceptances] for batch in batches
            ]
            surfaces[drafter] = SpeedupSurface(tuple(batches), tuple(acceptances), np.array(best))
        return surfaces

    def _verify_s(
        self, batch: int, context_tokens_each: float | None = None
    ) -> Callable[[float], float]:
        """Return a function from draft tokens that each request verifies to seconds."""
        each = self.context_tokens_each if context_tokens_each is None else context_tokens_each
        return partial(step_s, self.latency, self.tp_degree, batch, batch * each)


def choose_drafter(
    ladder: Ladder, acceptances: Mapping[str, float], batch: int
) -> DraftSetting | None:
    """Return one drafter and window for the whole batch, or None if no drafter pays.

    `acceptances`: each drafter's mean over the last steps, as from `token_acceptance`. Drafters
    without one are passed over. In a tie, the first of the ladder wins.

    Deviation: "do not draft" is a possible result.
    """
    rungs = [drafter for drafter in ladder.drafters if drafter in acceptances]
    choices = {drafter: ladder.best(drafter, acceptances[drafter], batch) for drafter in rungs}
    paying = [drafter for drafter in rungs if choices[drafter].window]
    if not paying:
        return None
    drafter = max(paying, key=lambda drafter: choices[drafter].speedup)
    return DraftSetting(drafter, choices[drafter].window)
