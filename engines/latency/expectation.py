"""Expected tokens from drafting, in turn or ahead (SpecActor, section 4.1, Modeling TGS). Pure.

w: the draft window. p: probability that a draft token is right, independent of the others. D:
seconds in which the drafter makes one token for each request. V: seconds of a verification. One
request, in a batch that goes on in step, generates this many tokens per second:

    in turn    (1 + p + ... + p^w) / (w D + V)                            `coupled`
    ahead      sum_i S_i (1 + p + ... + p^m_i) / (V sum_i S_i)            `streamed_step`

Ahead: the drafter makes token after token, with at most 2 w - 1 of them not yet verified. The
verifier never waits. Its step takes the drafts that have arrived, at most w, and decodes plainly if
there are none. A step with m draft tokens emits the a right ones and one token of the model's own.
If a = m, the model's token must equal the next draft token too. Otherwise the later drafts are
thrown away, and the next step finds nothing. Between two mismatches nothing is random: step i finds
m_i tokens, with probability S_i = p^((m_0 + 1) + ... + (m_(i-1) + 1)).

A drafter's step cannot be stopped. After a mismatch, and after a rest, the request waits until the
present step ends, and only then gets its first token. This wait is any share of D, all alike
(`_PHASES`). A request that has the drafter alone finds it at rest more often: its waits are the
stationary ones of the chain from one mismatch to the next.

D and V are constant here, and a draft token arrives at once. A step with nothing to verify takes V
too, because it is one row of a batch in which others verify.

V itself depends on the drafts that a step verifies (`engines.latency.drafting_pace`).

Deviation: the paper has tau_w / max(w D, V), with tau_w = sum_{a<w} p^a (1-p) (a+1) / 2 + w p^w. It
counts half of a partial window, and omits the model's own token, the empty step after a mismatch
and the wait for the drafter.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

_LEAST_SURVIVAL = 1e-7
_MAX_STEPS = 1000
"""Steps after which a stream that hardly ever ends is cut off. Its mean has long settled."""
_ROUNDING = 1e-9
_PACES = 16
"""Distinct paces for each drafted token per step."""
_VARIES = 1 / 32
"""Drafted tokens by which steps differ: half of a pace's rounding."""
_NUM_PHASES = 8
_PHASES = (0.0, *((n + 0.5) / _NUM_PHASES for n in range(_NUM_PHASES)))
"""Shares of D until the drafter's step ends, evenly spread. 0: the drafter rests."""


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
def streamed_step(
    window: int, acceptance: float, drafts_per_step: float, alone: bool = False
) -> StreamedStep:
    """Return the mean step. `drafts_per_step`: V / D. `alone`: the drafter drafts for this request
    only. Raise ValueError."""
    if window < 1 or not 0.0 <= acceptance <= 1.0:
        raise ValueError(f"window {window} must be >= 1 and acceptance {acceptance} in [0, 1]")
    # Beyond filling both windows within a step, a faster drafter changes nothing.
    pace = min(drafts_per_step, 2 * window)
    if not alone:
        sums = [_stream(window, acceptance, pace, phase, False)[0] for phase in _PHASES[1:]]
        steps, *means = np.mean(sums, axis=0)
    else:
        # At a whole number of tokens, a little more or less decides how many a step finds.
        paces = max(0.0, pace - _VARIES), pace + _VARIES
        streams = [
            [_stream(window, acceptance, one, phase, True) for one in paces] for phase in _PHASES
        ]
        chances = [np.mean([_next_phases(ends) for _, ends in each], axis=0) for each in streams]
        sums = np.mean([[sums for sums, _ in each] for each in streams], axis=1)
        steps, *means = _stationary(np.array(chances)) @ sums
    return StreamedStep(*(float(mean / steps) for mean in means))


def _stream(
    window: int, acceptance: float, pace: float, phase: float, alone: bool
) -> tuple[list[float], list[tuple[float, float]]]:
    """Return sums from one mismatch to the next, and where that next one finds the drafter.

    The sums are steps, and then those of a `StreamedStep`. `phase`: that of the first mismatch. The
    ends are phases with their chances.
    """
    prefix = list(accumulate(acceptance**m for m in range(window + 1)))
    steps = tokens = verified = verifying = rejecting = 0.0
    ends: list[tuple[float, float]] = []
    survival, left = 1.0, phase
    for num_verified, left in _course(window, pace, phase, alone):
        steps += survival
        tokens += survival * prefix[num_verified]
        verified += survival * num_verified
        verifying += survival * (num_verified > 0)
        rejecting += survival * (1.0 - acceptance**num_verified)
        goes_on = survival * acceptance ** (num_verified + 1)
        ends.append((left, survival - goes_on))
        survival = goes_on
        if survival < _LEAST_SURVIVAL:
            break
    # Here the drafter has fallen behind the verifier, and catches up as after a mismatch.
    ends.append((left, survival))
    return [steps, tokens, verified, verifying, rejecting], ends


def _next_phases(ends: Sequence[tuple[float, float]]) -> np.ndarray:
    """Return the chance of each of `_PHASES`. An end counts for those within a quarter, because V
    and D vary from step to step."""
    phases, chances = np.array(ends).T
    rests = phases == 0.0
    apart = np.abs((np.array(_PHASES[1:]) - phases[:, None] + 0.5) % 1.0 - 0.5) * _NUM_PHASES
    near = np.maximum(0.0, 2.0 - apart) / 4.0
    return np.concatenate(([chances[rests].sum()], chances[~rests] @ near[~rests]))


def _stationary(chances: np.ndarray) -> np.ndarray:
    """Return the stationary distribution of a chain. `chances`: [from, to]."""
    num = len(chances)
    equations = np.vstack((chances.T - np.eye(num), np.ones(num)))
    return np.linalg.lstsq(equations, np.eye(num + 1)[num], rcond=None)[0]


def rounded_pace(window: int, drafts_per_step: float) -> float:
    """Return V / D in whole sixteenths, capped where more changes nothing with this window."""
    return round(min(drafts_per_step, 2.0 * window) * _PACES) / _PACES


def _course(
    window: int, drafts_per_step: float, phase: float, alone: bool
) -> Iterator[tuple[int, float]]:
    """Yield each step after a mismatch, while all drafts are right: the draft tokens that it
    verifies, and the phase of the drafter when it ends.

    The unit of time is one drafted token. `idle`: time in which nothing is drafted for this
    request.
    """
    limit, num_drafted, num_used = 2 * window - 1, 0, 0
    # A drafter that fills all streams within a step rests at its end.
    wait = 0.0 if alone or phase <= drafts_per_step - limit else phase
    idle = phase if alone else wait
    for step in range(1, _MAX_STEPS + 1):
        num_verified = min(num_drafted - num_used, window)
        end = step * drafts_per_step
        possible = math.floor(end - idle + _ROUNDING)
        full = possible >= num_used + limit
        if full:
            idle = end - (num_used + limit) + wait
        num_drafted = max(num_drafted, min(possible, num_used + limit))
        yield num_verified, 0.0 if full else max(0.0, possible + 1.0 - (end - idle)) % 1.0
        num_used += num_verified + 1
        if num_drafted < num_used:
            return
