"""Predict the time of many steps of a batch whose members do not change. Pure.

A batch begins with C context tokens, and each step adds G. Without drafts, G is the batch size.
With drafts, G is larger. Step i takes `step_s(C + i * G)`. Where this is a straight line, n steps
take `n * first + slope * n * (n - 1) / 2` seconds. So a stretch of ten thousand steps costs three
look-ups.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

TOLERANCE = 1e-3
"""Largest relative error in the middle of a stretch that counts as straight."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive steps, each `slope_s` seconds longer than the one before."""

    steps: int
    first_s: float
    slope_s: float

    def seconds(self, steps: int) -> float:
        return steps * self.first_s + self.slope_s * steps * (steps - 1) / 2

    def steps_within(self, seconds: float) -> int:
        """Return the most steps that end within so many seconds (the root of a quadratic)."""
        half, linear = self.slope_s / 2, self.first_s - self.slope_s / 2
        root = math.sqrt(max(0.0, linear**2 + 4 * half * seconds))
        # Both forms are equal. Each avoids the subtraction of nearly equal numbers.
        steps = 2 * seconds / (linear + root) if linear > 0 else (root - linear) / (2 * half)
        # Count a step that ends exactly at this moment, whatever the rounding.
        return min(self.steps, int(steps + 1e-6))


class Interval(NamedTuple):
    """A time in which an engine's batch does not change."""

    start_s: float
    end_s: float
    batch: int
    waiting: int
    """Requests that wait for a place in the batch."""
    prefill: bool
    """Whether this is a prefill: one step, in which only joining requests get a token."""
    drafter: str = ""
    """Drafter of most decoding requests; empty without drafting."""


@dataclass(frozen=True, slots=True)
class SteadyBatch:
    """The steps of an engine until its batch changes."""

    interval: Interval
    stretches: tuple[Stretch, ...]

    @property
    def steps(self) -> int:
        return sum(stretch.steps for stretch in self.stretches)

    def seconds(self, steps: int) -> float:
        total = 0.0
        for stretch in self.stretches:
            taken = min(steps, stretch.steps)
            total += stretch.seconds(taken)
            steps -= taken
        return total

    def steps_at(self, now_s: float) -> int:
        """Return the number of steps that have ended at this time."""
        left, steps = now_s - self.interval.start_s, 0
        for stretch in self.stretches:
            taken = stretch.steps_within(max(0.0, left))
            steps += taken
            if taken < stretch.steps:
                break
            left -= stretch.seconds(taken)
        return steps


def plan_stretches(
    step_s: Callable[[float], float], growth: float, context_tokens: float, steps: int
) -> tuple[Stretch, ...]:
    """Divide `steps` steps of a batch into stretches in which the step time is a straight line.

    Args:
        step_s: Seconds of one step by context tokens.
        growth: Context tokens that a step adds, with fractions.
        context_tokens: Context of the batch before its first step.

    Compared with a sum over single steps, the error is below `TOLERANCE` in the middle of a
    stretch. It is zero where the latency is a straight line.
    """
    first_s = step_s(context_tokens)
    if steps == 1:
        return (Stretch(1, first_s, 0.0),)
    last_s = step_s(context_tokens + (steps - 1) * growth)
    slope_s = (last_s - first_s) / (steps - 1)
    half = steps // 2
    middle_s = step_s(context_tokens + half * growth)
    if steps <= 3 or abs(first_s + half * slope_s - middle_s) <= TOLERANCE * middle_s:
        return (Stretch(steps, first_s, slope_s),)
    middle = context_tokens + half * growth
    return (
        *plan_stretches(step_s, growth, context_tokens, half),
        *plan_stretches(step_s, growth, middle, steps - half),
    )
