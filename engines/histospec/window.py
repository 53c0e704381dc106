"""How many tokens to draft for each request (RhymeRL 5.4). Pure, for all rows of a batch at once.

The windows are the only state; they live with their requests.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class WindowPolicy(Protocol):
    """Windows are int32 [rows], between 1 and `cap`."""

    @property
    def cap(self) -> int:
        """The longest draft, in tokens."""
        ...

    def first(self, num_rows: int) -> np.ndarray:
        """Windows of requests that begin."""
        ...

    def next(
        self, windows: np.ndarray, num_drafted: np.ndarray, num_accepted: np.ndarray
    ) -> np.ndarray:
        """Windows after a verification. A row for which nothing was drafted keeps its window; one
        whose draft was shorter than its window and right counts as fully accepted."""
        ...


@dataclass(frozen=True)
class AIMD:
    """Additive increase after full acceptance, back to the start after any rejection."""

    start: int = 2
    step: int = 2
    cap: int = 32

    def first(self, num_rows: int) -> np.ndarray:
        return np.full(num_rows, self.start, np.int32)

    def next(
        self, windows: np.ndarray, num_drafted: np.ndarray, num_accepted: np.ndarray
    ) -> np.ndarray:
        grown = np.minimum(windows + self.step, self.cap)
        return _moved(windows, num_drafted, num_accepted, grown, self.start)


@dataclass(frozen=True)
class Fixed:
    """The same window always."""

    cap: int

    def first(self, num_rows: int) -> np.ndarray:
        return np.full(num_rows, self.cap, np.int32)

    def next(
        self,
        windows: np.ndarray,
        num_drafted: np.ndarray,  # noqa: ARG002
        num_accepted: np.ndarray,  # noqa: ARG002
    ) -> np.ndarray:
        return windows


@dataclass(frozen=True)
class Doubling:
    """Doubled after full acceptance, halved after a rejection, as the paper's public recipe has
    it. A match in a repetitive history goes on for long, or breaks at once."""

    start: int = 2
    cap: int = 32

    def first(self, num_rows: int) -> np.ndarray:
        return np.full(num_rows, self.start, np.int32)

    def next(
        self, windows: np.ndarray, num_drafted: np.ndarray, num_accepted: np.ndarray
    ) -> np.ndarray:
        grown, shrunk = np.minimum(windows * 2, self.cap), np.maximum(windows // 2, self.start)
        return _moved(windows, num_drafted, num_accepted, grown, shrunk)


def _moved(
    windows: np.ndarray,
    num_drafted: np.ndarray,
    num_accepted: np.ndarray,
    grown: np.ndarray,
    shrunk: np.ndarray | int,
) -> np.ndarray:
    """Grown where all was accepted, shrunk where not, as before where nothing was drafted."""
    moved = np.where(num_accepted == num_drafted, grown, shrunk)
    return np.where(num_drafted > 0, moved, windows).astype(np.int32)


DEFAULT = "goodput"
"""Window policy that measured best (`refrain bench drafting`)."""


def window_policy(name: str, cap: int) -> WindowPolicy:
    """Window policy by its name. `goodput` drafts as far as it may: the gate keeps what pays
    (`engines.histospec.gate`)."""
    match name:
        case "paper":
            return AIMD(cap=cap)
        case "doubling":
            return Doubling(cap=cap)
        case _:
            return Fixed(cap)
