"""How long a forward pass takes, learnt from those that were. Pure.

    seconds = speed (a + f few rows + b rows beyond + c context + p prompt tokens)   without drafts
            + d rows that draft + e draft tokens                                     what they add

Coefficients come from recursive least squares of the relative error, with slow forgetting: a, f,
b, c and p from passes without drafts alone, d and e from what the other passes take beyond that. So
what a pass without drafts costs does not drift while hardly any is made; `speed` is how those of
late compare with the many of a first epoch. To know it there are slots of the clock in which
nothing is drafted (`plain_is_due`), the same for all engines of a machine: where they share its
cores, one takes longer while another verifies. For the same reason the first pass after drafts
teaches nothing: the host is still at their many tokens. The coefficients begin with a prior, which
a few dozen passes outweigh. The prior of drafts is a share of what a row takes without them, as
then known: a draft token of a large model on a CPU takes a thousand times what one of a small model
takes. It is never taken to cost less than `LEAST_SHARE` of that: while passes without drafts are
few, an error in what they take would make drafts look free.
"""

from collections.abc import Mapping
from math import exp, hypot

import numpy as np

from engines.latency.measured import FEW_ROWS

FORGET = 1.0 - 2.0**-9
"""Weight that earlier passes of a kind keep at each one."""
SPEED_PASSES, SPEED_PLAIN_PASSES = 512, 64
"""Passes, of any kind and without drafts, after which what was known of the speed counts a third:
a few laps without any drafts must not outweigh what is seen in the slots of many."""
PLAIN_PERIOD_S = 1.0
"""Seconds from one slot without drafts to the next: a rollout stage of seconds has several, and one
of them a few passes."""
MODEL_ERROR = 0.03
"""Share by which passes without drafts differ from what the formula can say."""
PRIOR_S = 0.1
"""Seconds of passes without drafts that the speed of 1 stands for before the first one."""
OUTLIER = 4.0
"""A pass that took so many times what was expected was interrupted, and teaches nothing."""
LASTING = 8
"""Outliers of one kind in a row from which on they are no interruption: the machine is slower."""
WARM_UP_STEPS = 16
"""Passes before outliers are told from others."""
_PRIOR = np.array([2e-3, 5e-5, 5e-5, 1e-8, 5e-6, 0.0, 0.0])
_PRIOR_SCALE = np.array([1e-2, 2e-4, 2e-4, 1e-7, 3e-5, 0.0, 0.0])
"""Prior of the coefficients in seconds, and how far they may be off; of drafts see below."""
_DRAFTS_PRIOR = np.array([0.02, 0.5])
_DRAFTS_PRIOR_SCALE = np.array([0.4, 0.3])
"""The same of a row that drafts and of a draft token, as shares of a row's time."""
LEAST_SHARE = 0.2
"""Least cost of a draft token, as a share of a row's time: that of a pass of `FULL_BATCH` rows
without drafts over their number."""
FULL_BATCH = 128
OPTIMISM = 0.5
"""Standard deviations below what drafts are expected to cost."""
_NOISE, _LEAST_NOISE, _NOISE_PASSES = 0.2, 0.02, 32
"""Relative standard deviation of a pass's time, before it is measured over about so many passes
without drafts, and at least."""
_PROMPTS = np.eye(7)[4]
_PLAIN, _DRAFTS = slice(0, 5), slice(5, 7)


def pass_content(
    num_scheduled: np.ndarray, num_computed: np.ndarray, num_prompt: np.ndarray
) -> np.ndarray:
    """Factors of the coefficients for one pass: 1, the first rows that decode, those beyond, their
    context, prompt tokens, rows that verify drafts, draft tokens.

    All int [rows]: tokens of each request in the pass, with keys and values before it, of its
    prompt.
    """
    decoding = num_computed >= num_prompt
    scheduled = num_scheduled[decoding]
    return np.array(
        [
            1.0,
            *_few_and_beyond(len(scheduled)),
            num_computed[decoding].sum(),
            num_scheduled[~decoding].sum(),
            np.count_nonzero(scheduled > 1),
            scheduled.sum() - len(scheduled),
        ]
    )


def _few_and_beyond(num_rows: int) -> tuple[int, int]:
    return min(num_rows, FEW_ROWS), max(num_rows - FEW_ROWS, 0)


class MeasuredStepTimes:
    """Step times learnt while the engine runs; implements `engines.histospec.gate.StepTimes`."""

    def __init__(self, plain_share: float = 0.0) -> None:
        """`plain_share`: of the time, for passes without drafts."""
        self.coefficients = _PRIOR.copy()
        self.num_learnt = 0
        self._plain_share = plain_share
        self._covariance = np.diag(_PRIOR_SCALE**2)
        self._speed = np.array([PRIOR_S, PRIOR_S, PRIOR_S**2])
        """Sums over passes without drafts, the earlier ones with less weight: seconds that they
        took, seconds that were expected, squared errors."""
        self._noise = _NOISE**2
        """Relative variance of the time of passes without drafts."""
        self._num_drafted = 0
        """Passes with drafts that were learnt from."""
        self._num_since_plain = 0
        self._after_drafts = False
        """The last pass had drafts."""
        self._num_outliers = {True: 0, False: 0}
        """Outliers in a row among the latest passes with drafts, and without."""
        self._drafting = np.ones(2)
        """Rows that drafted of late, and all rows of their passes."""
        self._began_s: float | None = None
        self._seconds = {"decode_s": 0.0, "verify_s": 0.0}

    def step_s(
        self, batch: int, context_tokens: float, num_rows: np.ndarray, num_tokens: np.ndarray
    ) -> np.ndarray:
        row_s = self._row_s(context_tokens / batch)
        if not self._num_drafted:
            self._suppose(row_s)
        d, e = np.maximum(self.coefficients[_DRAFTS], 0.0)
        # What drafts cost is taken at its lower bound: what is not known is tried, and so learnt.
        (dd, de), (_, ee) = self._covariance[_DRAFTS, _DRAFTS]
        variance = dd * num_rows**2 + 2.0 * de * num_rows * num_tokens + ee * num_tokens**2
        drafts_s = d * num_rows + e * num_tokens - OPTIMISM * np.sqrt(np.maximum(variance, 0.0))
        drafts_s = np.maximum(drafts_s, LEAST_SHARE * row_s * num_tokens)
        return self._decoding_s(batch, context_tokens) + drafts_s

    @property
    def costs(self) -> tuple[float, ...]:
        """Seconds as `schemas.counts.DraftingCounts.step_costs` has them; none while they are
        little more than the prior."""
        if self.num_learnt < WARM_UP_STEPS:
            return ()
        *plain, _, d, e = np.maximum(self.coefficients, 0.0).tolist()
        drafting, rows = self._drafting.tolist()
        return (*(self.speed * each for each in plain), d * drafting / rows, e)

    @property
    def speed(self) -> float:
        """Time of passes without drafts of late, as a multiple of what the coefficients say."""
        return float(self._speed[0] / self._speed[1])

    @property
    def plain_error(self) -> float:
        """Standard error of the predicted time of passes without drafts, as a share of it."""
        return hypot(MODEL_ERROR, float(np.sqrt(self._speed[2]) / self._speed[1]))

    def plain_is_due(self, now_s: float) -> bool:
        """Whether this is a time to draft nothing, by the clock of the machine's engines."""
        return now_s % PLAIN_PERIOD_S < self._plain_share * PLAIN_PERIOD_S

    def state(self) -> dict[str, list]:
        """State that `restore` takes."""
        return {
            "coefficients": self.coefficients.tolist(),
            "covariance": self._covariance.tolist(),
            "speed": self._speed.tolist(),
            "drafts": [self._num_drafted, self._noise],
        }

    def restore(self, state: Mapping[str, list]) -> None:
        """Begin with what another one has learnt. Raises ValueError when it is of another kind."""
        own = {name: np.array(values) for name, values in self.state().items()}
        given = {name: np.array(state.get(name, ()), float) for name in own}
        if any(given[name].shape != own[name].shape for name in own):
            raise ValueError("step times of another version")
        self.coefficients, self._covariance, self._speed, drafts = given.values()
        self._num_drafted, self._noise = int(drafts[0]), float(drafts[1])

    def take(self) -> dict[str, float]:
        """Seconds of passes since the last call, those that decode and those that verify, without
        the part of them that went into prompts."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    def pass_begins(self, now_s: float) -> None:
        self._began_s = now_s

    def pass_ended(self, now_s: float, content: np.ndarray) -> None:
        """`content`: see `pass_content`. One that decodes nothing teaches nothing: the engine may
        have had nothing to do before it."""
        began_s, self._began_s = self._began_s, None
        if began_s is None or not content[1]:
            return
        seconds = now_s - began_s
        drafted = bool(content[_DRAFTS].any())
        plain_s = self._plain_s(content)
        drafts_s = float(content[_DRAFTS] @ np.maximum(self.coefficients[_DRAFTS], 0.0))
        prompts_s = self._plain_s(content * _PROMPTS)
        decoded_share = 1.0 - prompts_s / (plain_s + drafts_s)
        self._seconds["verify_s" if drafted else "decode_s"] += seconds * decoded_share
        self._num_since_plain += 1
        if self._teaches(drafted, seconds > OUTLIER * (plain_s + drafts_s)):
            self._learn(seconds, content, drafted, plain_s, drafts_s)
            self.num_learnt += 1
        if drafted:
            _, few, beyond, _, _, rows, _ = content
            self._drafting = FORGET * self._drafting + [rows, few + beyond]
        self._after_drafts = drafted

    def _teaches(self, drafted: bool, outlier: bool) -> bool:
        """Whether to learn from a pass: not from outliers, unless they last. While passes without
        drafts are outliers too, it is not the drafts that are slow."""
        if self.num_learnt < WARM_UP_STEPS:
            return True
        if self._after_drafts and not drafted:
            return not outlier
        self._num_outliers[drafted] = self._num_outliers[drafted] + 1 if outlier else 0
        lasting = self._num_outliers[drafted] >= LASTING
        return not outlier or (lasting and not (drafted and self._num_outliers[False]))

    def _decoding_s(self, batch: int, context_tokens: float) -> float:
        return self._plain_s(np.array([1.0, *_few_and_beyond(batch), context_tokens, 0.0]))

    def _row_s(self, context_tokens: float) -> float:
        """Return the time of a row in a full batch of rows with so long a context."""
        return self._decoding_s(FULL_BATCH, FULL_BATCH * context_tokens) / FULL_BATCH

    def _plain_s(self, content: np.ndarray) -> float:
        return self.speed * float(content[_PLAIN] @ np.maximum(self.coefficients[_PLAIN], 0.0))

    def _learn(
        self, seconds: float, content: np.ndarray, drafted: bool, plain_s: float, drafts_s: float
    ) -> None:
        warm = self.num_learnt >= WARM_UP_STEPS
        noise = max(float(np.sqrt(self._noise)), _LEAST_NOISE) if drafted else _NOISE
        noise_s = noise * (plain_s + drafts_s if warm else seconds)
        if drafted:
            if not self._num_drafted:
                self._suppose(self._row_s(content[3] / (content[1] + content[2])))
            self._fit(_DRAFTS, content, seconds - plain_s, noise_s)
            self._num_drafted += 1
            return
        if self._after_drafts:
            return
        if warm:
            age = self._num_since_plain / SPEED_PASSES + 1.0 / SPEED_PLAIN_PASSES
            kept = exp(-age) ** np.array([1.0, 1.0, 2.0])
            error = min(abs(seconds / plain_s - 1.0), 1.0)
            self._noise += (error**2 - self._noise) / _NOISE_PASSES
            self._speed = kept * self._speed + [
                seconds,
                plain_s / self.speed,
                (seconds - plain_s) ** 2,
            ]
        self._num_since_plain = 0
        # What is common to all passes is speed, so that their shape stays that of the many.
        self._fit(_PLAIN, content, seconds / self.speed, noise_s / self.speed)

    def _suppose(self, row_s: float) -> None:
        """Set the prior of drafts, of which no pass has told anything yet."""
        self.coefficients = self.coefficients.copy()
        self.coefficients[_DRAFTS] = row_s * _DRAFTS_PRIOR
        self._covariance[_DRAFTS, _DRAFTS] = np.diag((row_s * _DRAFTS_PRIOR_SCALE) ** 2)

    def _fit(self, part: slice, content: np.ndarray, seconds: float, noise_s: float) -> None:
        features, covariance = content[part], self._covariance[part, part]
        spread = covariance @ features
        gain = spread / (FORGET * noise_s**2 + features @ spread)
        self.coefficients = self.coefficients.copy()
        self.coefficients[part] += gain * (seconds - features @ self.coefficients[part])
        self._covariance[part, part] = (covariance - np.outer(gain, spread)) / FORGET
