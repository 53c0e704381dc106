"""The batch gate: which drafted tokens are worth verifying in this step (RhymeRL 5.4). Pure.

A step of B requests that verifies a set S of draft tokens takes time(B, S). It yields B + sum over
S of p tokens, where p is the probability that a token and all before it are accepted. The gate
keeps the tokens with the largest p, as many as give the most tokens per second. It keeps none if
plain decoding is faster. So windows shrink as batches grow, request by request, and drafting is off
where it does not pay.

Drafting itself takes time, even when nothing is kept. A step that drafts is called a look. A look
pays only if the step gains more than drafting took. While looks do not pay, they become rarer.

Deviation from the paper: the paper switches drafting off above a profiled batch size. Here drafting
is off at the batch sizes where the gate keeps nothing.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median_low
from typing import Protocol

import numpy as np

from refrain.engines.histospec.budget import keep_likeliest
from refrain.engines.latency.interface import Latency

_WINDOWS = (0, 1, 2, 4, 8, 16, 32)


class StepTimes(Protocol):
    """Predicted seconds of decoding steps."""

    def step_s(
        self, batch: int, context_tokens: float, num_rows: np.ndarray, num_tokens: np.ndarray
    ) -> np.ndarray:
        """Return the seconds of a step of `batch` requests that verifies `num_tokens` draft tokens
        of `num_rows` of them, for each element of these arrays."""
        ...


class ProfiledStepTimes:
    """Step times from a latency model, linear in the draft tokens between `_WINDOWS`."""

    def __init__(self, latency: Latency, tp_degree: int) -> None:
        self._latency, self._tp_degree = latency, tp_degree
        self._known: dict[tuple[int, int], np.ndarray] = {}

    def step_s(
        self, batch: int, context_tokens: float, num_rows: np.ndarray, num_tokens: np.ndarray
    ) -> np.ndarray:
        del num_rows
        # Round to an eighth of a power of two: the curves bend less than that.
        bucket = int(8 * np.log2(max(1.0, context_tokens)))
        times = self._known.get((batch, bucket))
        if times is None:
            args = (self._tp_degree, batch, 2.0 ** (bucket / 8))
            times = np.array([self._latency.verify_s(*args, window) for window in _WINDOWS])
            self._known[batch, bucket] = times
        return np.interp(num_tokens, np.multiply(_WINDOWS, batch), times)


_STATE = ("num_closed", "num_skipped", "closed_batch")


@dataclass(slots=True)
class Backoff:
    """Exponential backoff of looks while nothing pays, so that unused drafting costs nothing. It
    ends when the batch shrinks."""

    num_closed: int = 0
    """Looks in a row in which nothing paid."""
    num_skipped: int = 0
    closed_batch: int = 0

    def state(self) -> dict[str, int]:
        """Return the state that `restore` takes."""
        return {name: getattr(self, name) for name in _STATE}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from the state of another instance. Raise ValueError if it has another
        format."""
        if state.keys() != set(_STATE) or not all(type(value) is int for value in state.values()):
            raise ValueError("gate of another version")
        for name, value in state.items():
            setattr(self, name, value)

    def looks(self, batch: int) -> bool:
        """Return whether to look in this step."""
        if self.num_closed >= LOOKS and batch > REOPEN_SHARE * self.closed_batch:
            self.num_skipped += 1
            if self.num_skipped < min(LONGEST_BREAK, 2 ** (self.num_closed - LOOKS + 1)):
                return False
        self.num_skipped = 0
        return True

    def note(self, batch: int, *, pays: bool) -> None:
        """Record whether a look paid."""
        if pays:
            self.num_closed = 0
        else:
            self.num_closed += 1
            self.closed_batch = batch


@dataclass(slots=True)
class DraftTimes:
    """Time that drafting for a batch takes: the median of the last looks. The first looks of a
    process read and compile, and any look may be interrupted."""

    per_row_s: list[float] = field(default_factory=list)
    """Seconds per row, counting `LOOK_ROWS` extra rows in each batch."""

    def of(self, batch: int) -> float:
        """Return the seconds for a batch; 0 before the first look."""
        return median_low(self.per_row_s) * (batch + LOOK_ROWS) if self.per_row_s else 0.0

    def learn(self, batch: int, seconds: float) -> None:
        self.per_row_s = [*self.per_row_s, seconds / (batch + LOOK_ROWS)][-NUM_REMEMBERED:]


@dataclass(slots=True)
class Gate:
    """Keeps the drafts that pay. When nothing has paid for a while, it stops drafting for some
    steps."""

    times: StepTimes | None
    """Predicted times of a step. With None, everything is kept."""
    backoff: Backoff = field(default_factory=Backoff)
    draft_times: DraftTimes = field(default_factory=DraftTimes)
    _looked: bool = False

    def state(self) -> dict[str, dict]:
        """Return the state that `restore` takes."""
        return {"breaks": self.backoff.state(), "look_times": asdict(self.draft_times)}

    def restore(self, state: Mapping[str, dict]) -> None:
        """Continue from the state of another instance. Raise ValueError if it has another
        format."""
        known = self.state()
        if state.keys() != known.keys() or state["look_times"].keys() != known["look_times"].keys():
            raise ValueError("gate of another version")
        self.backoff.restore(state["breaks"])
        self.draft_times = DraftTimes([float(s) for s in state["look_times"]["per_row_s"]])

    def looks(self, batch: int) -> bool:
        """Return whether to draft in this step."""
        self._looked = self.times is None or self.backoff.looks(batch)
        return self._looked

    def proposed(self, batch: int, seconds: float) -> None:
        """Record how long drafting for this step took, if the step drafted."""
        if self._looked:
            self.draft_times.learn(batch, seconds)
        self._looked = False

    def keep(
        self,
        probabilities: np.ndarray,
        num_drafted: np.ndarray,
        context_tokens: float,
        num_observed: float,
    ) -> np.ndarray:
        """Return how many of each request's draft tokens to verify; int32 [rows], as `num_drafted`
        is.

        `probabilities`: [rows, window], see `Acceptance.of_drafts`.
        `context_tokens`: tokens of all rows.
        `num_observed`: number of draft tokens from which these probabilities were learnt.
        """
        if self.times is None:
            return num_drafted
        batch = len(num_drafted)
        look_s = self.draft_times.of(batch)
        threshold, pays = _choose(self.times, probabilities, batch, context_tokens, look_s)
        self.backoff.note(batch, pays=pays)
        paying = (probabilities >= threshold).sum(axis=1).astype(np.int32)
        return keep_likeliest(probabilities, paying, FIRST_TOKENS + int(num_observed))


FIRST_TOKENS = 32
"""Most draft tokens of the first step. Later steps may verify this many plus all that were verified
before. Trying something unknown more often within one step teaches nothing more."""
LEAST_GAIN = 1.03
"""Least ratio of tokens per second with drafts to those without at which drafts are verified. The
estimates of acceptance and cost are no more exact than this."""
LOOK_ROWS = 128
"""Fixed cost of a look, in rows."""
NUM_REMEMBERED = 15
"""Number of looks whose times are remembered."""
LOOKS = 4
"""Looks in a row without gain before looks become rarer."""
LONGEST_BREAK = 64
"""Most steps without a look."""
REOPEN_SHARE = 0.8
"""Looks resume when the batch has shrunk to this share."""


def _choose(
    times: StepTimes, probabilities: np.ndarray, batch: int, context_tokens: float, look_s: float
) -> tuple[float, bool]:
    """Return the least probability to keep, infinite if nothing is kept. Also return whether the
    step, including the look that took `look_s`, is faster than a step without drafts."""
    # Sort by columns: of equal tokens, those nearer the start of a draft come first.
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
