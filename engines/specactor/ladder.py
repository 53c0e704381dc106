"""The draft ladder: which drafter is the fastest (SpecActor, section 4.2, figure 10). Pure.

    acceptance of the last steps ──①──► each drafter's rung ──②──► the largest speed-up, if > 1

A rung is a drafter's speed-up over plain decoding, against the probability p that a draft token is
accepted, by batch, with the best window there is. It comes from the latency model, so from offline
profiling alone: neither the policy nor its texts are needed.

What is measured is another acceptance: accepted over drafted tokens. Of a window w, the k-th token
counts as accepted with probability p^k, as all before it must be right, so

    rate = (p + p^2 + ... + p^w) / w

which rises from 0 to 1 with p. `token_acceptance` inverts it; the paper uses one word for both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from scipy.optimize import brentq

from engines.latency.interface import Latency
from engines.latency.speedup import Choice, Drafting, SpeedupSurface, expected_tokens
from schemas.rollout import DraftProgress, DraftSetting


def acceptance_rate(window: int, acceptance: float) -> float:
    """Accepted over drafted tokens that windows of `window` tokens have on average."""
    if window < 1:
        raise ValueError(f"a window of {window} tokens has no acceptance rate")
    return (expected_tokens(window, acceptance) - 1) / window


@lru_cache(maxsize=4096)
def token_acceptance(window: int, rate: float) -> float:
    """The probability p that gives this acceptance rate at this window."""
    if window < 1 or not 0.0 <= rate <= 1.0:
        raise ValueError(f"window {window} must be >= 1 and acceptance rate {rate} in [0, 1]")
    return float(brentq(lambda p: acceptance_rate(window, p) - rate, 0.0, 1.0))


def request_acceptance(drafting: DraftProgress | None) -> float | None:
    """The probability p of one request; None while nothing was verified. Its rate is rounded to
    hundredths, which is more than a request can tell, so that most are looked up."""
    if drafting is None or drafting.setting is None or drafting.acceptance_rate is None:
        return None
    return token_acceptance(drafting.setting.window, round(drafting.acceptance_rate, 2))


@dataclass(frozen=True, slots=True)
class Ladder:
    """Drafters on one engine layout, at a typical context per sequence."""

    latency: Latency
    tp_degree: int
    drafters: tuple[str, ...]
    context_tokens_each: float
    """Mean context of one sequence, in tokens."""
    max_window: int = 32

    def best(self, drafter: str, acceptance: float, batch: int) -> Choice:
        """Window and speed-up of one drafter; window 0 where it does not pay."""
        return self._rung(drafter).best_window(batch, acceptance)

    def surfaces(
        self, batches: Sequence[int], acceptances: Sequence[float]
    ) -> dict[str, SpeedupSurface]:
        """Every rung over a grid, by drafter (figure 10 a)."""
        return {
            drafter: SpeedupSurface.compute(self._rung(drafter), batches, acceptances)
            for drafter in self.drafters
        }

    def _rung(self, drafter: str) -> Drafting:
        return Drafting(
            self.latency, self.tp_degree, drafter, self.context_tokens_each, self.max_window
        )


def choose_drafter(
    ladder: Ladder, acceptances: Mapping[str, float], batch: int
) -> DraftSetting | None:
    """One drafter for the whole batch, and its window; None where none pays.

    `acceptances`: mean of each drafter over the last steps, as `token_acceptance`. Drafters
    without one are passed over. Of equal ones, the first of the ladder.

    Deviation: "do not draft" is an answer.
    """
    rungs = [drafter for drafter in ladder.drafters if drafter in acceptances]
    choices = {drafter: ladder.best(drafter, acceptances[drafter], batch) for drafter in rungs}
    paying = [drafter for drafter in rungs if choices[drafter].window]
    if not paying:
        return None
    drafter = max(paying, key=lambda drafter: choices[drafter].speedup)
    return DraftSetting(drafter, choices[drafter].window)
