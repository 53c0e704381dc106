"""Parts that pictures of engines over time share."""

from math import log2
from typing import Protocol

LEAST_HEIGHT = 0.25
"""Share of a lane that a batch of one takes."""


class Busy(Protocol):
    """A time in which an engine had a batch."""

    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def batch(self) -> int: ...


def batch_box(lane: int, busy: Busy, largest: int, height: float) -> list[tuple[float, float]]:
    """Corners of a box in a lane, as high as the batch is large (logarithmic); the largest batch
    has this height."""
    share = log2(busy.batch) / log2(largest) if busy.batch > 1 else 0.0
    bottom = lane + height / 2
    top = bottom - height * (LEAST_HEIGHT + (1 - LEAST_HEIGHT) * share)
    return [
        (busy.start_s, bottom),
        (busy.start_s, top),
        (busy.end_s, top),
        (busy.end_s, bottom),
    ]
