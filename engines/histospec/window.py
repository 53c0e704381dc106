"""Number of tokens to draft for each request (RhymeRL 5.4). Pure, for all rows of a batch at once.

The windows are the only state, and the caller stores them with their requests.
"""

from dataclasses import dataclass

import numpy as np

DEFAULT = "goodput"
"""The window policy that measured best (`refrain bench drafting`)."""


@dataclass(frozen=True)
class WindowPolicy:
    """Policy that never changes a window. Windows are int32 [rows]."""

    start: int
    """Window of a new request, at least 1."""
    cap: int
    """Longest draft, in tokens."""

    def first(self, num_rows: int) -> np.ndarray:
        return np.full(num_rows, self.start, np.int32)

    def next(
        self, windows: np.ndarray, num_drafted: np.ndarray, num_accepted: np.ndarray
    ) -> np.ndarray:
        """Return the windows after a verification. A row without a draft keeps its window. A draft
        that was shorter than its window and fully accepted counts as full acceptance."""
        moved = np.where(num_accepted == num_drafted, *self._moves(windows))
        return np.where(num_drafted > 0, moved, windows).astype(np.int32)

    def _moves(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the windows after full acceptance, and those after any rejection."""
        return windows, windows


@dataclass(frozen=True)
class AIMD(WindowPolicy):
    """Additive increase after full acceptance; back to the start after any rejection."""

    start: int = 2
    cap: int = 32
    step: int = 2

    def _moves(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.minimum(windows + self.step, self.cap), np.full_like(windows, self.start)


@dataclass(frozen=True)
class Doubling(WindowPolicy):
    """Twice the window after full acceptance, half of it after a rejection, like the paper's public
    recipe. In a repetitive history a match either goes on for long or breaks at once."""

    start: int = 2
    cap: int = 32

    def _moves(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.minimum(windows * 2, self.cap), np.maximum(windows // 2, self.start)


class Fixed(WindowPolicy):
    """The same window always."""

    def __init__(self, cap: int) -> None:
        super().__init__(cap, cap)


def window_policy(name: str, cap: int) -> WindowPolicy:
    """Return the window policy of this name. `goodput` always drafts up to the cap, and the gate
    keeps what pays (`engines.histospec.gate`)."""
    match name:
        case "paper":
            return AIMD(cap=cap)
        case "doubling":
            return Doubling(cap=cap)
        case _:
            return Fixed(cap)
