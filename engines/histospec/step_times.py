"""How long a decoding step takes, learnt from those that were. Pure.

    seconds = a + b batch + c context + d requests that draft + e draft tokens

by recursive least squares of the relative error, with slow forgetting. It begins with a prior in
which drafting costs little, and which a few dozen steps outweigh.
"""

from collections.abc import Mapping, Sequence

import numpy as np

FORGET = 1.0 - 2.0**-9
"""Weight that earlier steps keep at each step."""
OUTLIER = 4.0
"""A step that took so many times what was expected was interrupted, and teaches nothing."""
WARM_UP_STEPS = 16
"""Steps before outliers are told from others."""
_PRIOR = np.array([2e-3, 5e-5, 1e-8, 1e-6, 6e-6])
_PRIOR_SCALE = np.array([1e-2, 2e-4, 1e-7, 1e-4, 3e-5])
"""Seconds: the coefficients before the first step, and how far they may be off."""
OPTIMISM = 0.5
"""Standard deviations below what drafts are expected to cost."""
_NOISE = 0.2
"""Relative standard deviation of one step's time."""


class MeasuredStepTimes:
    """Implements `engines.histospec.gate.StepTimes`."""

    def __init__(self) -> None:
        self.coefficients = _PRIOR.copy()
        self.num_learnt = 0
        self._covariance = np.diag(_PRIOR_SCALE**2)
        self._began_s: float | None = None
        self._begun = np.zeros(5)

    def step_s(
        self, batch: int, context_tokens: float, num_rows: np.ndarray, num_tokens: np.ndarray
    ) -> np.ndarray:
        a, b, c, d, e = np.maximum(self.coefficients, 0.0)
        # What drafts cost is taken at its lower bound: what is not known is tried, and so learnt.
        (dd, de), (_, ee) = self._covariance[3:, 3:]
        variance = dd * num_rows**2 + 2.0 * de * num_rows * num_tokens + ee * num_tokens**2
        drafts_s = d * num_rows + e * num_tokens - OPTIMISM * np.sqrt(np.maximum(variance, 0.0))
        return a + b * batch + c * context_tokens + np.maximum(drafts_s, 0.0)

    @property
    def costs(self) -> tuple[float, ...]:
        """The coefficients, as a latency model; none while they are little more than the prior."""
        if self.num_learnt < WARM_UP_STEPS:
            return ()
        return tuple(np.maximum(self.coefficients, 0.0).tolist())

    def state(self) -> dict[str, list]:
        """State that `restore` takes."""
        return {
            "coefficients": self.coefficients.tolist(),
            "covariance": self._covariance.tolist(),
        }

    def restore(self, state: Mapping[str, list]) -> None:
        """Begin with what another one has learnt. Raises ValueError when it is of another kind."""
        coefficients, covariance = (np.array(state[name], float) for name in self.state())
        if coefficients.shape != (5,) or covariance.shape != (5, 5):
            raise ValueError("step times of another version")
        self.coefficients, self._covariance = coefficients, covariance

    def step_begins(
        self, now_s: float, context_tokens: float, num_drafts: Sequence[int] | np.ndarray
    ) -> None:
        """A step starts at `now_s` with so many draft tokens for each of its requests."""
        drafts = np.asarray(num_drafts)
        self._began_s = now_s
        self._begun = np.array(
            [1.0, len(drafts), context_tokens, np.count_nonzero(drafts), drafts.sum()], float
        )

    def step_ended(self, now_s: float, num_rows: int, joined: bool) -> None:
        """The step has ended; `num_rows` of its requests go on, others have `joined`."""
        began_s, self._began_s = self._began_s, None
        if began_s is None or joined or not 0 < num_rows <= self._begun[1]:
            return
        # Requests that ended with the step before took no part in this one.
        features = self._begun.copy()
        features[1:] *= num_rows / features[1]
        self._learn(features, now_s - began_s)

    def _learn(self, features: np.ndarray, seconds: float) -> None:
        expected_s = float(features @ self.coefficients)
        if self.num_learnt >= WARM_UP_STEPS and seconds > OUTLIER * expected_s > 0.0:
            return
        spread = self._covariance @ features
        gain = spread / (FORGET * (_NOISE * seconds) ** 2 + features @ spread)
        self.coefficients = self.coefficients + gain * (seconds - expected_s)
        self._covariance = (self._covariance - np.outer(gain, spread)) / FORGET
        self.num_learnt += 1


class PassTimes:
    """Seconds of an engine's forward passes, those that decode and those that verify.

    One with prefill is neither: before it, the engine may have had nothing to do.
    """

    def __init__(self) -> None:
        self._seconds = {"decode_s": 0.0, "verify_s": 0.0}
        self._began: tuple[float, str] | None = None

    def pass_begins(self, now_s: float, num_draft_tokens: int) -> None:
        self._began = now_s, "verify_s" if num_draft_tokens else "decode_s"

    def pass_ended(self, now_s: float, prefilled: bool) -> None:
        """`prefilled`: some of its requests were new, or were in their prompt."""
        if self._began and not prefilled:
            began_s, kind = self._began
            self._seconds[kind] += now_s - began_s
        self._began = None

    def take(self) -> dict[str, float]:
        """Seconds since the last call, by kind of pass."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken
