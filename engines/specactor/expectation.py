"""Expected tokens from drafting, decoupled or coupled (SpecActor, section 4.1, Modeling TGS). Pure.

w: the draft window. p: probability that a draft token is right, independent of the others. D:
seconds to draft one token. V: seconds of a verification. One request, in a batch that goes on in
step, generates this many tokens per second:

    coupled    (1 + p + ... + p^w) / (w D + V)                            taking turns
    streamed   sum_i S_i (1 + p + ... + p^m_i) / (V sum_i S_i)            decoupled

Decoupled: the drafter drafts token after token, with at most 2 w - 1 of them not yet verified. The
verifier never waits. Its step takes the drafts that have arrived, at most w, and decodes plainly if
there are none. A step with m draft tokens emits the a right ones and one token of the model's own.
If a = m, the model's token must equal the next draft token too. Otherwise the later drafts are
thrown away, the drafter starts again, and the next step finds nothing. Between two mismatches
nothing is random: step i finds m_i tokens, with probability
S_i = p^((m_0 + 1) + ... + (m_(i-1) + 1)).

D and V are constant here, and a draft token arrives at once. A step with nothing to verify takes V
too, because it is one row of a batch in which others verify.

V depends on the drafts that a step verifies. These are seldom a whole window, and they were drafted
within V. So V is a fixed point (`settled_step`). For a batch whose step takes v_0 + c m seconds,
with m the mean of the m_i,

    V = v_0 + c m(V / D)

Compared with batches simulated token by token (`tests/specactor/test_settled.py`), its tokens per
step are off by 0.5 % on average and by less than 3 % everywhere.

Deviation: the paper has tau_w / max(w D, V), with tau_w = sum_{a<w} p^a (1-p) (a+1) / 2 + w p^w. It
counts half of a partial window, and omits the model's own token and the empty step after a
mismatch. Compared with a simulation of the protocol (`tests/specactor/machine.py`, 252 points: w 1
to 12, p 0.3 to 0.95, D / V 0.05 to 0.8), its tokens per second are off by 26 % on average. Those of
`streamed` are off by 0.2 %, which is noise. Where w D <= V the errors are 13 and 0.1 %.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

from scipy.optimize import brentq

_LEAST_SURVIVAL = 1e-7
_MAX_STEPS = 1000
"""Steps after which a stream that hardly ever ends is cut off. Its mean has long settled."""
_ROUNDING = 1e-9
_SETTLED = 1e-3
"""Relative precision of a step's seconds."""
_PACES = 16
"""Distinct paces for each drafted token per step."""
_SMEAR = tuple((offset, (4 - abs(offset)) / 16) for offset in range(-3, 4))
"""Nearby paces and their weights. The standard deviation is a tenth of a token."""


def expected_tokens(window: int, acceptance: float) -> float:
    """Return tokens per verification, the model's own included: 1 + p + ... + p^w."""
    if window < 0 or not 0.0 <= acceptance <= 1.0:
        raise ValueError(f"window {window} must be >= 0 and acceptance {acceptance} in [0, 1]")
    return float(sum(acceptance**k for k in range(window + 1)))


class StreamedStep(NamedTuple):
    """Means over a verifier's steps, for one request."""

    tokens: float
    """Tokens emitted, including the model's own."""
    num_verified: float
    """Draft tokens verified."""
    verifying: float
    """Share of steps with something to verify."""
    rejecting: float
    """Share of steps that reject a draft token."""


def streamed_tokens_per_s(
    window: int, acceptance: float, draft_token_s: float, verify_s: float
) -> float:
    """Return tokens per second when decoupled. `draft_token_s`: D, at least 0. `verify_s`: V,
    positive. Raise ValueError for a bad window or acceptance."""
    drafts_per_step = verify_s / draft_token_s if draft_token_s > 0 else math.inf
    return streamed_step(window, acceptance, drafts_per_step).tokens / verify_s


def streamed_step(window: int, acceptance: float, drafts_per_step: float) -> StreamedStep:
    """Return the mean step. `drafts_per_step`: V / D. Raise ValueError."""
    _require(window, acceptance)
    prefix = list(accumulate(acceptance**m for m in range(window + 1)))
    tokens = verified = verifying = rejecting = steps = 0.0
    survival = 1.0
    # Beyond filling both windows within a step, a faster drafter changes nothing.
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
    """The mean step of a verifier for one request, and its time."""

    step: StreamedStep
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one request."""
        return self.step.tokens / self.seconds


def settled_step(
    window: int, acceptance: float, draft_token_s: float, verify_s: Callable[[float], float]
) -> SettledStep:
    """Return the step of a batch that verifies what is drafted during one such step.

    All requests of the batch are drafted for in the same way. `draft_token_s`: D in this batch, at
    least 0. `verify_s`: as in `settled_s`. The pace V / D is rounded, so that lookups hit the
    cache. Raise ValueError for a bad window or acceptance.
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
    """Return the seconds of a step that verifies what arrives during one: s = V(n(s)).

    `num_verified`: n, the mean draft tokens of a request that a step of so many seconds verifies,
    at most `most`. `verify_s`: V, positive seconds by that mean, never falling with it.
    """

    @cache
    def excess_s(seconds: float) -> float:
        return verify_s(num_verified(seconds)) - seconds

    low_s, high_s = verify_s(0), verify_s(most)
    # Apart from rounding, the excess is >= 0 at the low end and <= 0 at the high end.
    if excess_s(low_s) <= 0:
        return low_s
    if excess_s(high_s) >= 0:
        return high_s
    return float(brentq(excess_s, low_s, high_s, rtol=_SETTLED))


def paced_step(window: int, acceptance: float, drafts_per_step: float) -> StreamedStep:
    """Return `streamed_step` for a mean V / D, in sixteenths, averaged over nearby paces.

    V varies from step to step. At a whole number of tokens, a little more or less decides how many
    tokens a step finds. Results are cached.
    """
    return step_at(window, acceptance, rounded_pace(window, drafts_per_step))


def rounded_pace(window: int, drafts_per_step: float) -> int:
    """Return V / D in sixteenths, capped where more changes nothing with this window."""
    # Beyond filling both windows within a step, a faster drafter changes nothing.
    return round(min(drafts_per_step, 2.0 * window) * _PACES)


@lru_cache(1 << 17)
def step_at(window: int, acceptance: float, sixteenths: int) -> StreamedStep:
    """Return `paced_step` for a rounded pace."""
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
    """Return tokens per second when coupled. `draft_window_s`: seconds to draft the whole window;
    0 at window 0, which is plain decoding."""
    return expected_tokens(window, acceptance) / (draft_window_s + verify_s)


def _course(window: int, drafts_per_step: float) -> Iterator[int]:
    """Yield the draft tokens verified in each step after a mismatch, while all are right.

    The unit of time is one drafted token. `idle` is the time that the drafter has waited so far.
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
