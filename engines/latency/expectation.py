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

V itself depends on the drafts that a step verifies (`engines.latency.drafted_step`).

Deviation: the paper has tau_w / max(w D, V), with tau_w = sum_{a<w} p^a (1-p) (a+1) / 2 + w p^w. It
counts half of a partial window, and omits the model's own token and the empty step after a
mismatch. Compared with a simulation of the protocol (`tests/specactor/machine.py`, 252 points: w 1
to 12, p 0.3 to 0.95, D / V 0.05 to 0.8), its tokens per second are off by 26 % on average. Those of
`streamed` are off by 0.2 %, which is noise. Where w D <= V the errors are 13 and 0.1 %.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

_LEAST_SURVIVAL = 1e-7
_MAX_STEPS = 1000
"""Steps after which a stream that hardly ever ends is cut off. Its mean has long settled."""
_ROUNDING = 1e-9
_PACES = 16
"""Distinct paces for each drafted token per step."""
_SMEAR = tuple((n / _PACES, (4 - abs(n)) / 16) for n in range(-3, 4))
"""Offsets of nearby paces, and their weights. The standard deviation is a tenth of a token."""


@lru_cache(1 << 14)
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


@lru_cache(1 << 17)
def streamed_step(window: int, acceptance: float, drafts_per_step: float) -> StreamedStep:
    """Return the mean step. `drafts_per_step`: V / D. Raise ValueError."""
    if window < 1 or not 0.0 <= acceptance <= 1.0:
        raise ValueError(f"window {window} must be >= 1 and acceptance {acceptance} in [0, 1]")
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


def rounded_pace(window: int, drafts_per_step: float) -> float:
    """Return V / D in whole sixteenths, capped where more changes nothing with this window."""
    return round(min(drafts_per_step, 2.0 * window) * _PACES) / _PACES


@lru_cache(1 << 17)
def paced_step(window: int, acceptance: float, pace: float) -> StreamedStep:
    """Return `streamed_step` for a mean V / D (`rounded_pace`), averaged over nearby paces.

    V varies from step to step. At a whole number of tokens, a little more or less decides how many
    tokens a step finds.
    """
    near = (
        [weight * value for value in streamed_step(window, acceptance, max(0.0, pace + offset))]
        for offset, weight in _SMEAR
    )
    return StreamedStep(*map(sum, zip(*near, strict=True)))


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
