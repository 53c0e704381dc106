"""How fast a draft setting is: tokens, drafts and seconds of a step. Pure.

    in turn    1 + p + ... + p^w tokens; verifies w drafts, which are drafted before the step
    ahead      tokens and drafts of `expectation.streamed_step`; drafted while a step runs
    seconds    s = D + V(m): D of the slowest drafting in turn, m the mean drafts verified

p: probability that a draft token is accepted. w: the draft window. Ahead, m depends on the drafts
that arrive within s, and s on m. So s is a fixed point. The ladder, the planner, reconfiguration
and forecasts take speeds from here; simulated engines take tokens from `streamed_step` and settle s
step by step. Compared with the protocol token by token (`tests/specactor/test_settled.py`), tokens
per second are off by less than 3 %. A drafter is taken to draft for all requests in each step.
Those that are far enough ahead rest, so one whose time depends on its batch is a little faster.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

from scipy.optimize import brentq

from refrain.engines.latency.expectation import expected_tokens, rounded_pace, streamed_step
from refrain.engines.latency.interface import Latency
from refrain.schemas.rollout import DraftSetting

_SETTLED = 1e-3
"""Relative precision of a step's seconds."""


Drafted = tuple[DraftSetting, float]
"""How a request is drafted for: its setting, and the probability that a draft token is accepted."""


class Pace(NamedTuple):
    """Means over the steps of a request."""

    tokens: float
    """Tokens that a step adds, including the model's own."""
    num_verified: float
    """Draft tokens that a step verifies."""
    draft_s: float
    """Seconds of drafting before each step."""
    step_s: float
    """Seconds of a step of the batch, with drafting."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s


def draft_s(latency: Latency, setting: DraftSetting, batch: int) -> float:
    """Return the seconds to draft for a batch: a whole window in turn, else a token each."""
    return latency.draft_s(setting.drafter, batch, setting.window if setting.coupled else 1)


def pace(
    drafted: Drafted, batch: int, drafting_s: float, verify_s: Callable[[float], float]
) -> Pace:
    """Return the pace in a batch whose requests are all drafted for alike. The arguments are those
    of `batch_paces`."""
    return batch_paces({drafted: batch}, batch, lambda _: drafting_s, verify_s)[drafted]


def batch_paces(
    counts: Mapping[Drafted, int],
    num_requests: int,
    drafting_s: Callable[[DraftSetting], float],
    verify_s: Callable[[float], float],
) -> dict[Drafted, Pace]:
    """Return the pace of each way of drafting in one batch.

    `counts`: requests that are drafted for in each way, out of `num_requests`. A request that is
    alone in its batch is taken to have its drafter alone.
    `drafting_s`: see `draft_s`; at least 0.
    `verify_s`: seconds by the mean draft tokens that a request verifies; positive, never falling.
    """
    costs_s = {setting: drafting_s(setting) for setting in dict.fromkeys(of for of, _ in counts)}
    before_s = max((cost_s for of, cost_s in costs_s.items() if of.coupled), default=0.0)
    coupled = sum(num * of.window for (of, _), num in counts.items() if of.coupled)
    alone = num_requests == 1
    ahead: dict[DraftSetting, list[tuple[int, float]]] = {}
    for (setting, acceptance), num in counts.items():
        if not setting.coupled:
            ahead.setdefault(setting, []).append((num, acceptance))

    def after(num_verified: float) -> float:
        return before_s + verify_s(num_verified / num_requests)

    @cache
    def num_arrived(setting: DraftSetting, pace: float) -> float:
        of_each = ahead[setting]
        steps = ((num, streamed_step(setting.window, p, pace, alone)) for num, p in of_each)
        return sum(num * step.num_verified for num, step in steps)

    @cache
    def excess_s(step_s: float) -> float:
        arrived = (num_arrived(of, _arrivals(of, costs_s[of], step_s)) for of in ahead)
        return after(coupled + sum(arrived)) - step_s

    step_s = after(sum(num * of.window for (of, _), num in counts.items()))
    if ahead:
        step_s = _fixed_point(excess_s, after(coupled), step_s)
    arrivals = {of: _arrivals(of, costs_s[of], step_s) for of in ahead}
    return {
        (of, p): Pace(expected_tokens(of.window, p), of.window, costs_s[of], step_s)
        if of.coupled
        else Pace(*streamed_step(of.window, p, arrivals[of], alone)[:2], 0.0, step_s)
        for of, p in counts
    }


def _fixed_point(excess_s: Callable[[float], float], low_s: float, high_s: float) -> float:
    """Return the step's seconds. Apart from rounding, the excess is at least 0 at the low end and
    at most 0 at the high end."""
    if excess_s(low_s) <= 0:
        return low_s
    if excess_s(high_s) >= 0:
        return high_s
    return float(brentq(excess_s, low_s, high_s, rtol=_SETTLED))


def _arrivals(setting: DraftSetting, token_s: float, step_s: float) -> float:
    """Return the draft tokens of a request that arrive during a step, rounded."""
    return rounded_pace(setting.window, step_s / token_s if token_s else math.inf)
