"""How long a batch takes whose members do not change. Pure.

Step i of a batch that began with C context tokens, and that every step makes G longer, takes
`step_s(C + i * G)`: G is the batch size where every sequence gains one token per step, and more
where they draft. Over a stretch in which that is a straight line, n steps take
`n * first + slope * n * (n - 1) / 2` seconds, so a stretch of ten thousand steps costs three
look-ups.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

TOLERANCE = 1e-3
"""A stretch counts as straight when its middle is off by less than this share."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive steps, each `slope_s` seconds longer than the one before."""

    steps: int
    first_s: float
    slope_s: float

    def seconds(self, steps: int) -> float:
        return steps * self.first_s + self.slope_s * steps * (steps - 1) / 2

    def steps_within(self, seconds: float) -> int:
        """The most steps that end within so many seconds (the root of a quadratic)."""
        half, linear = self.slope_s / 2, self.first_s - self.slope_s / 2
        root = math.sqrt(max(0.0, linear**2 + 4 * half * seconds))
        # Both are the same number; in neither do two like terms cancel.
        steps = 2 * seconds / (linear + root) if linear > 0 else (root - linear) / (2 * half)
        # A step that ends at the very moment counts, whatever the rounding.
        return min(self.steps, int(steps + 1e-6))


class Interval(NamedTuple):
    """An engine's batch does not change for so long."""

    start_s: float
    end_s: float
    batch: int
    waiting: int
    """Requests that wait for a place."""
    prefill: bool
    """One step, in which the joining requests alone get a token."""
    drafter: str = ""
    """Drafter of most of those that decode; empty where they are not drafted for."""


@dataclass(frozen=True, slots=True)
class SteadyBatch:
    """Steps of an engine until its batch changes."""

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
        """Steps that have ended by then."""
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
    """Straight stretches that together are `steps` steps of this batch.

    `step_s(context_tokens)` is the time of one step, `growth` the context tokens that it adds,
    fractions included. Deviation from a sum over single steps: below `TOLERANCE` in the middle of
    a stretch, none where the latency is a straight line.
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
