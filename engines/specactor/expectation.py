"""Tokens that drafting yields, decoupled or coupled (SpecActor, section 4.1, Modeling TGS). Pure.

With w the draft window, p the probability that a draft token is right (each independently of the
others), D the seconds of drafting one token and V those of a verification, tokens per second of
one request, all of whose batch go on at the same time:

    coupled    (1 + p + ... + p^w) / (w D + V)                            in turn
    streamed   sum_i S_i (1 + p + ... + p^m_i) / (V sum_i S_i)            decoupled

Decoupled execution as it is run: the drafter drafts token after token and has at most 2 w - 1 that
are not verified. The verifier never waits: its step takes what has arrived, at most w tokens, and
decodes plainly when nothing has. A step with m draft tokens yields the a that are right and one
more, the model's own; where a = m, this one must equal the next draft token too. Otherwise what
was drafted beyond is thrown away, the drafter starts again, and the next step finds nothing.
Nothing is random between two mismatches, so a cycle has one course: in step i, m_i tokens are
there, with probability S_i = p^((m_0 + 1) + ... + (m_(i-1) + 1)).

D and V are taken as constant, a drafted token arrives at once, and a step with nothing to verify
takes V as well, since it is one row of a batch of which others verify.

V itself is that of what a step verifies, which is seldom the whole window, and what it verifies is
what is drafted in V. So V is a fixed point (`settled_step`): of a batch b with a step of v_0 + c m
seconds, m being the mean of the m_i,

    V = v_0 + c m(V / D)

Against batches simulated token by token (`tests/specactor/test_settled.py`) its tokens a step are
off by 0.5 % on average and by less than 3 % everywhere.

Deviation: the paper has tau_w / max(w D, V), with tau_w = sum_{a<w} p^a (1-p) (a+1) / 2 + w p^w. It
counts half of a partial window and knows neither the model's own token nor the empty step after a
mismatch. Against a simulation of the protocol (`tests/specactor/machine.py`, 252 points: w 1 to 12,
p 0.3 to 0.95, D / V 0.05 to 0.8) its tokens per second are off by 26 % on average, those of
`streamed` by 0.2 %, which is the noise; where w D <= V by 13 and 0.1 %.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

from scipy.optimize import brentq

_LEAST_SURVIVAL = 1e-7
_MAX_STEPS = 1000
"""Steps at which a stream that hardly ever ends is cut off; its mean has long settled."""
_ROUNDING = 1e-9
_SETTLED = 1e-3
"""Share of a step's seconds to which they are found."""
_PACES = 16
"""Paces that are told apart, for each token of a step."""
_SMEAR = tuple((offset, (4 - abs(offset)) / 16) for offset in range(-3, 4))
"""Paces about one, and their weights: the standard deviation is a tenth of a token."""


def expected_tokens(window: int, acceptance: float) -> float:
    """Tokens per verification, the model's own included: 1 + p + ... + p^w."""
    if window < 0 or not 0.0 <= acceptance <= 1.0:
        raise ValueError(f"window {window} must be >= 0 and acceptance {acceptance} in [0, 1]")
    return float(sum(acceptance**k for k in range(window + 1)))


class StreamedStep(NamedTuple):
    """A step of the verifier, on average, for one request."""

    tokens: float
    """Tokens emitted; one of them is the model's own."""
    num_verified: float
    """Draft tokens that are verified."""
    verifying: float
    """Share of the steps that have something to verify."""
    rejecting: float
    """Share of the steps that reject a draft token."""


def streamed_tokens_per_s(
    window: int, acceptance: float, draft_token_s: float, verify_s: float
) -> float:
    """Tokens per second of decoupled execution as it is run. `draft_token_s`: D, at least 0;
    `verify_s`: V, positive. Raises ValueError."""
    drafts_per_step = verify_s / draft_token_s if draft_token_s > 0 else math.inf
    return streamed_step(window, acceptance, drafts_per_step).tokens / verify_s


def streamed_step(window: int, acceptance: float, drafts_per_step: float) -> StreamedStep:
    """`drafts_per_step`: V / D. Raises ValueError."""
    _require(window, acceptance)
    prefix = list(accumulate(acceptance**m for m in range(window + 1)))
    tokens = verified = verifying = rejecting = steps = 0.0
    survival = 1.0
    # A drafter that fills both windows in a step need not be faster.
    for num_verified in _course(window, min(drafts_per_step, 2 * window)):
        tokens += survival * prefix[num_verified]
        verified += survival * num_verified
        verifying += survival * (num_verified > 0)
        rejecting += survival * (1.0 - acceptance**num_verified)
        steps += survival
        survival *= acceptance ** (num_verified + 1)
        if survival < _LEAST_SURVIVAL:
            break
    return StreamedStep(tokens / steps, verified / steps, verifying / steps, rejecting / steps)


class SettledStep(NamedTuple):
    """A step of the verifier, on average, for one request, and how long it takes."""

    step: StreamedStep
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one request."""
        return self.step.tokens / self.seconds


def settled_step(
    window: int, acceptance: float, draft_token_s: float, verify_s: Callable[[float], float]
) -> SettledStep:
    """Step of a batch whose requests are all drafted for so, once what a step verifies is what is
    drafted while one goes on.

    `draft_token_s`: D in this batch, at least 0; `verify_s`: as for `settled_s`. The pace V / D is
    rounded, so that steps are mostly looked up. Raises ValueError.
    """
    _require(window, acceptance)

    def after(seconds: float) -> StreamedStep:
        drafts_per_step = seconds / draft_token_s if draft_token_s > 0 else math.inf
        return paced_step(window, acceptance, drafts_per_step)

    seconds = settled_s(lambda seconds: after(seconds).num_verified, verify_s, window)
    return SettledStep(after(seconds), seconds)


def settled_s(
    num_verified: Callable[[float], float], verify_s: Callable[[float], float], most: float
) -> float:
    """Seconds of a step that verifies what has come during one: s = V(n(s)).

    `num_verified`: n, the mean draft tokens of a request that a step of so many seconds verifies,
    at most `most`. `verify_s`: V, positive seconds, by that mean, and not falling with it.
    """

    @cache
    def excess_s(seconds: float) -> float:
        return verify_s(num_verified(seconds)) - seconds

    low_s, high_s = verify_s(0), verify_s(most)
    # Rounding apart, the excess is at least 0 at the one end and at most 0 at the other.
    if excess_s(low_s) <= 0:
        return low_s
    if excess_s(high_s) >= 0:
        return high_s
    return float(brentq(excess_s, low_s, high_s, rtol=_SETTLED))


def paced_step(window: int, acceptance: float, drafts_per_step: float) -> StreamedStep:
    """`streamed_step` where V / D is so much on average, rounded to sixteenths: V differs from step
    to step, and at a whole number of tokens a little more or less decides what a step finds. Looked
    up where it was asked for before."""
    return step_at(window, acceptance, rounded_pace(window, drafts_per_step))


def rounded_pace(window: int, drafts_per_step: float) -> int:
    """V / D in sixteenths, as far as it matters with this window."""
    # A drafter that fills both windows in a step need not be faster.
    return round(min(drafts_per_step, 2.0 * window) * _PACES)


@lru_cache(1 << 17)
def step_at(window: int, acceptance: float, sixteenths: int) -> StreamedStep:
    """`paced_step` by a rounded pace."""
    near = (
        [weight * value for value in _steady_step(window, acceptance, max(0, sixteenths + offset))]
        for offset, weight in _SMEAR
    )
    return StreamedStep(*map(sum, zip(*near, strict=True)))


@lru_cache(1 << 17)
def _steady_step(window: int, acceptance: float, sixteenths: int) -> StreamedStep:
    return streamed_step(window, acceptance, sixteenths / _PACES)


def coupled_tokens_per_s(
    window: int, acceptance: float, draft_window_s: float, verify_s: float
) -> float:
    """Tokens per second where drafting and verification take turns. `draft_window_s`: of all the
    window; 0 at window 0, which is plain decoding."""
    return expected_tokens(window, acceptance) / (draft_window_s + verify_s)


def _course(window: int, drafts_per_step: float) -> Iterator[int]:
    """Draft tokens verified in each step since a mismatch, as long as all are right.

    Time runs in drafted tokens. `idle` is what the drafter has waited for so far.
    """
    limit, num_drafted, num_used, idle = 2 * window - 1, 0, 0, 0.0
    for step in range(_MAX_STEPS):
        num_there = num_drafted - num_used
        num_verified = min(num_there, window)
        yield num_verified
        end = (step + 1) * drafts_per_step
        possible = math.floor(end - idle + _ROUNDING)
        if possible >= num_used + limit:
            idle = end - (num_used + limit)
        num_drafted = min(possible, num_used + limit)
        num_used += num_verified + 1
        if num_drafted < num_used:
            return


def _require(window: int, acceptance: float) -> None:
    if window < 1 or not 0.0 <= acceptance <= 1.0:
        raise ValueError(f"window {window} must be >= 1 and acceptance {acceptance} in [0, 1]")
