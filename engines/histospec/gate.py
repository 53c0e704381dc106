"""How much of what was drafted is worth verifying in this step (RhymeRL 5.4, batch gate). Pure.

A step of B requests that verifies the set S of draft tokens yields B + sum over S of p tokens, p
being the probability that a token and all before it are accepted, and takes time(B, S). The gate
keeps the tokens with the largest p, as many as give the most tokens per second, and none when
plain decoding gives more. So windows shrink as batches grow, request by request, and drafting is
off where it does not pay.

To draft takes time too, before it is known what is worth verifying: in a step that has looked it is
spent whatever is kept; but a look pays only where more is gained than it took, and while looks do
not pay there are ever fewer.

Deviation from the paper, which switches drafting off above a profiled batch size: that size is
where this rule keeps nothing.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median_low
from typing import Protocol

import numpy as np

from engines.histospec.budget import keep_likeliest
from engines.latency.interface import Latency

_WINDOWS = (0, 1, 2, 4, 8, 16, 32)


class StepTimes(Protocol):
    """Predicted seconds of a decoding step of `batch` requests, per element of the arrays."""

    def step_s(
        self, batch: int, context_tokens: float, num_rows: np.ndarray, num_tokens: np.ndarray
    ) -> np.ndarray:
        """Seconds of a step that verifies `num_tokens` draft tokens, of `num_rows` requests."""
        ...


class ProfiledStepTimes:
    """Step times by a latency model: linear in the draft tokens between its windows."""

    def __init__(self, latency: Latency, tp_degree: int) -> None:
        self._latency, self._tp_degree = latency, tp_degree
        self._known: dict[tuple[int, int], np.ndarray] = {}

    def step_s(
        self, batch: int, context_tokens: float, num_rows: np.ndarray, num_tokens: np.ndarray
    ) -> np.ndarray:
        del num_rows
        # To an eighth of a power of two: the curves bend less than that.
        bucket = int(8 * np.log2(max(1.0, context_tokens)))
        times = self._known.get((batch, bucket))
        if times is None:
            args = (self._tp_degree, batch, 2.0 ** (bucket / 8))
            times = np.array([self._latency.verify_s(*args, window) for window in _WINDOWS])
            self._known[batch, bucket] = times
        return np.interp(num_tokens, np.multiply(_WINDOWS, batch), times)


_STATE = ("num_closed", "num_skipped", "closed_batch")


@dataclass(slots=True)
class Breaks:
    """Longer and longer breaks in looking for what has not paid for a while, until fewer requests
    run: what is off costs nothing."""

    num_closed: int = 0
    """Looks in a row in which nothing paid."""
    num_skipped: int = 0
    closed_batch: int = 0

    def state(self) -> dict[str, int]:
        """State that `restore` takes."""
        return {name: getattr(self, name) for name in _STATE}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on where another one was. Raises ValueError when it is of another kind."""
        if state.keys() != set(_STATE) or not all(type(value) is int for value in state.values()):
            raise ValueError("gate of another version")
        for name, value in state.items():
            setattr(self, name, value)

    def looks(self, batch: int) -> bool:
        """Whether to look in this step at all."""
        if self.num_closed >= LOOKS and batch > REOPEN_SHARE * self.closed_batch:
            self.num_skipped += 1
            if self.num_skipped < min(LONGEST_BREAK, 2 ** (self.num_closed - LOOKS + 1)):
                return False
        self.num_skipped = 0
        return True

    def note(self, batch: int, *, pays: bool) -> None:
        """Take in what a look has found."""
        if pays:
            self.num_closed = 0
        else:
            self.num_closed += 1
            self.closed_batch = batch


@dataclass(slots=True)
class LookTimes:
    """How long it takes to draft for a batch: the median of the last looks, as the first ones of a
    process read and compile, and any may be interrupted."""

    per_row_s: list[float] = field(default_factory=list)
    """Time of a row, with `LOOK_ROWS` more in each batch."""

    def of(self, batch: int) -> float:
        """Seconds; 0 before the first look."""
        return median_low(self.per_row_s) * (batch + LOOK_ROWS) if self.per_row_s else 0.0

    def learn(self, batch: int, seconds: float) -> None:
        self.per_row_s = [*self.per_row_s, seconds / (batch + LOOK_ROWS)][-NUM_REMEMBERED:]


@dataclass(slots=True)
class Gate:
    """Keeps what pays; when nothing has paid for a while it does not even look."""

    times: StepTimes | None
    """Predicted times of a step; None: everything is kept."""
    breaks: Breaks = field(default_factory=Breaks)
    look_times: LookTimes = field(default_factory=LookTimes)
    _looked: bool = False

    def state(self) -> dict[str, dict]:
        """State that `restore` takes."""
        return {"breaks": self.breaks.state(), "look_times": asdict(self.look_times)}

    def restore(self, state: Mapping[str, dict]) -> None:
        """Go on where another one was. Raises ValueError when it is of another kind."""
        known = self.state()
        if state.keys() != known.keys() or state["look_times"].keys() != known["look_times"].keys():
            raise ValueError("gate of another version")
        self.breaks.restore(state["breaks"])
        self.look_times = LookTimes([float(s) for s in state["look_times"]["per_row_s"]])

    def looks(self, batch: int) -> bool:
        """Whether to draft in this step at all."""
        self._looked = self.times is None or self.breaks.looks(batch)
        return self._looked

    def proposed(self, batch: int, seconds: float) -> None:
        """Take in how long it took to draft for a step, if it did."""
        if self._looked:
            self.look_times.learn(batch, seconds)
        self._looked = False

    def keep(
        self,
        probabilities: np.ndarray,
        num_drafted: np.ndarray,
        context_tokens: float,
        num_observed: float,
    ) -> np.ndarray:
        """How many of each request's draft tokens to verify; int32 [rows], as `num_drafted` is.

        `probabilities`: [rows, window], see `Acceptance.of_drafts`. `context_tokens`: of all rows.
        `num_observed`: draft tokens that these probabilities were learnt from.
        """
        if self.times is None:
            return num_drafted
        batch = len(num_drafted)
        look_s = self.look_times.of(batch)
        threshold, pays = _choose(self.times, probabilities, batch, context_tokens, look_s)
        self.breaks.note(batch, pays=pays)
        paying = (probabilities >= threshold).sum(axis=1).astype(np.int32)
        return keep_likeliest(probabilities, paying, FIRST_TOKENS + int(num_observed))


FIRST_TOKENS = 32
"""Draft tokens that the first step verifies, at most. A later one verifies as many more as were
verified before: to try what is not known more often in one step tells nothing more."""
LEAST_GAIN = 1.03
"""Tokens per second over those without drafts from which on drafts are verified: what is expected
of them and of their cost is not known better."""
LOOK_ROWS = 128
"""Rows that take as long as what each look takes whatever its batch."""
NUM_REMEMBERED = 15
"""Looks whose times are remembered."""
LOOKS = 4
"""Looks in which nothing paid before they become rarer."""
LONGEST_BREAK = 64
"""Steps without a look, at most."""
REOPEN_SHARE = 0.8
"""There is a look again when the batch has shrunk to this share."""


def _choose(
    times: StepTimes, probabilities: np.ndarray, batch: int, context_tokens: float, look_s: float
) -> tuple[float, bool]:
    """The least probability that is kept, infinite when nothing is; whether the step, with the look
    that took `look_s`, is faster than one without."""
    # By columns, so that of equal ones the earlier in a request come first.
    columns = probabilities.T.ravel()
    order = np.argsort(-columns, kind="stable")[: int((columns > 0.0).sum())]
    tokens = batch + np.concatenate([[0.0], np.cumsum(columns[order])])
    num_rows = np.concatenate([[0], np.cumsum(order < batch)])
    seconds = times.step_s(batch, context_tokens, num_rows, np.arange(len(order) + 1))
    rates = tokens / (look_s + seconds)
    best = int(np.argmax(rates))
    if rates[best] < LEAST_GAIN * rates[0]:
        return np.inf, False
    return float(columns[order[best - 1]]), bool(rates[best] > LEAST_GAIN * batch / seconds[0])
