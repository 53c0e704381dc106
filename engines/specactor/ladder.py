"""The draft ladder: which drafter is the fastest (SpecActor, section 4.2, figure 10). Pure.

    acceptance of the last steps ──①──► each drafter's rung ──②──► the largest speed-up, if > 1

A rung gives a drafter's speed-up over plain decoding with the best window, by batch and by p, the
probability that a draft token is accepted. It comes from the latency model alone, so from offline
profiling (RhymeRL 5.4, pre-profiling). It needs neither the policy nor its texts. A text drafter
drafts in turn with verification, a draft model ahead of it in a process of its own; both speeds are
those of `engines.latency.drafting_pace`:

    speedup(w, p) = tokens / s * decode_s

p is measured from the tokens that verifications look at: the accepted ones and, if a verification
stops early, the rejected one. So p = accepted / (accepted + rejections), whatever the lengths of
the drafts (`DraftProgress.acceptance`). The acceptance rate is a different figure, accepted over
drafted tokens. It depends on the window, because the k-th token of w is accepted with probability
p^k:

    rate = (p + p^2 + ... + p^w) / w

`token_acceptance` inverts this if only the rate is known. The paper uses one word for both.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq

from refrain.engines.latency.drafting_pace import Pace, draft_s, pace
from refrain.engines.latency.expectation import expected_tokens
from refrain.engines.latency.forecast import step_s
from refrain.engines.latency.interface import Latency
from refrain.schemas.rollout import DraftProgress, DraftSetting

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
    ahead: Mapping[str, int] = field(default_factory=dict)
    """Drafters with processes of their own, which draft ahead. By name, the engines that share one
    process: it drafts for all their batches. The other drafters draft in turn with verification."""
    max_drafted: int | None = None
    """Most requests in one step of a drafter process; for more it takes several steps. None: any
    number."""

    def setting(self, drafter: str, window: int) -> DraftSetting:
        """Return the setting with this window, in turn or ahead as the drafter drafts."""
        return DraftSetting(drafter, window, coupled=drafter not in self.ahead)

    def pace(
        self,
        setting: DraftSetting | None,
        acceptance: float,
        batch: int = 1,
        context_tokens_each: float | None = None,
    ) -> Pace:
        """Return the pace of one request in a batch of requests like it.

        `setting`: None for no drafts. `context_tokens_each`: mean context of a request. None: the
        ladder's.
        """
        verify_s = self._verify_s(batch, context_tokens_each)
        if setting is None:
            return Pace(1.0, 0.0, 0.0, verify_s(0))
        return pace((setting, acceptance), batch, self._draft_s(setting, batch), verify_s)

    def paces(
        self,
        drafter: str,
        acceptance: float,
        batch: int = 1,
        context_tokens_each: float | None = None,
    ) -> dict[DraftSetting | None, Pace]:
        """Return the pace of each window, no drafts first, up to a window that changes nothing. The
        arguments are those of `pace`."""
        at = acceptance, batch, context_tokens_each
        paces: dict[DraftSetting | None, Pace] = {None: self.pace(None, *at)}
        before: Pace | None = None
        for window in range(1, self.max_window + 1):
            setting = self.setting(drafter, window)
            found = self.pace(setting, *at)
            if found == before:
                break
            paces[setting] = before = found
        return paces

    def speedup(self, drafter: str, acceptance: float, batch: int, window: int) -> float:
        """Return tokens per second with this window over tokens per second without drafts."""
        setting = self.setting(drafter, window) if window else None
        plain = self.pace(None, acceptance, batch)
        return self.pace(setting, acceptance, batch).tokens_per_s / plain.tokens_per_s

    def best(self, drafter: str, acceptance: float, batch: int) -> Choice:
        """Return the fastest window. In a tie, return the smaller, so 0 unless drafting pays."""
        paces = self.paces(drafter, acceptance, batch)
        setting = max(paces, key=lambda setting: paces[setting].tokens_per_s)
        if setting is None:
            return Choice(0, 1.0)
        speedup = paces[setting].tokens_per_s / paces[None].tokens_per_s
        return Choice(setting.window, speedup)

    def best_setting(
        self,
        drafter: str,
        acceptance: float,
        batch: int = 1,
        context_tokens_each: float | None = None,
    ) -> DraftSetting:
        """Return the shortest window that is nearly the fastest (`NEAR`) of those that draft. The
        arguments are those of `pace`."""
        paces = self.paces(drafter, acceptance, batch, context_tokens_each)
        speeds = {setting: of.tokens_per_s for setting, of in paces.items() if setting}
        enough = max(speeds.values()) / (1.0 + NEAR)
        return next(setting for setting, speed in speeds.items() if speed >= enough)

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

    def _draft_s(self, setting: DraftSetting, batch: int) -> float:
        """Return the seconds of drafting: see `drafting_pace.draft_s`."""
        num_drafted = batch * self.ahead.get(setting.drafter, 1)
        if setting.coupled or self.max_drafted is None:
            return draft_s(self.latency, setting, num_drafted)
        num_steps = math.ceil(num_drafted / self.max_drafted)
        return num_steps * draft_s(self.latency, setting, math.ceil(num_drafted / num_steps))

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
    return ladder.setting(drafter, choices[drafter].window)
