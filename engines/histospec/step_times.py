"""Time of a forward pass, learnt from past ones. Pure.

    seconds = speed (a + f few rows + b rows beyond + c context + p prompt tokens)   without drafts
            + d rows that draft + e draft tokens                                     what they add

Recursive least squares of the relative error, with slow forgetting, gives the coefficients. a, f,
b, c and p come from passes without drafts alone; d and e from the time that other passes take
beyond that. So the cost of a pass without drafts does not drift while such passes are rare. `speed`
compares recent passes without drafts with the many of the first epoch.

To keep measuring `speed`, nothing is drafted in some slots of the clock (`plain_is_due`), nor in
the first passes. The slots are the same for all engines of a machine: engines that share cores slow
each other down when one verifies. The first pass after drafts teaches nothing, because the host
still works on their many tokens. So a slot has room for several passes.

The coefficients start from a prior that a few dozen passes outweigh. The prior of drafts is a share
of a row's time without drafts, because a draft token of a large model on a CPU takes a thousand
times as long as one of a small model. It never costs less than `LEAST_SHARE` of that time. While
passes without drafts are few, errors in their cost would otherwise make drafts look free.
"""

from collections.abc import Mapping
from math import ceil, exp, hypot, log2
from statistics import median

import numpy as np

from refrain.engines.latency.measured import FEW_ROWS

FORGET = 1.0 - 2.0**-9
"""Weight that earlier passes of a kind keep at each new one."""
SPEED_PASSES, SPEED_PLAIN_PASSES = 512, 64
"""Number of passes, of any kind and without drafts, after which older observations of the speed
weigh a third. Passes that happen to have no drafts must not outweigh those of many slots."""
PLAIN_PERIOD_S = 1.0
"""Least seconds from one slot without drafts to the next. A rollout stage of seconds has several
slots, with a few passes each. Where passes are slow, the time is doubled until a slot has room for
`SLOT_PASSES`. So each slot of an engine with slower passes is one of all engines."""
SLOT_PASSES = 3
PASS_MEAN = 16
"""Passes that the mean time covers."""
FIRST_PLAIN = 4
"""Passes without drafts that teach before the first drafts."""
PLAIN_SHARE = 1 / 16
"""Share of the time in which engines without a profile draft nothing: it shows how long a pass
without drafts takes, and so what drafting saves."""
MODEL_ERROR = 0.03
"""Relative error of the formula for passes without drafts."""
PRIOR_S = 0.1
"""Seconds of passes without drafts that the initial speed of 1 counts as."""
OUTLIER = 4.0
"""Ratio of measured to expected time above which a pass was interrupted and teaches nothing."""
LASTING = 8
"""Number of outliers of one kind in a row that are no interruption: the machine has become
slower."""
WARM_UP_STEPS = 16
"""Passes before outliers are detected."""
_PRIOR = np.array([2e-3, 5e-5, 5e-5, 1e-8, 5e-6, 0.0, 0.0])
"""Prior of the coefficients in seconds."""
_PRIOR_SCALE = np.array([1e-2, 2e-4, 2e-4, 1e-7, 3e-5, 0.0, 0.0])
"""Prior of the coefficients in seconds, and its standard deviation. Drafts have their own below."""
_DRAFTS_PRIOR = np.array([0.02, 0.5])
_DRAFTS_PRIOR_SCALE = np.array([0.4, 0.3])
"""The same for a row that drafts and for a draft token, as shares of a row's time."""
LEAST_SHARE = 0.2
"""Least cost of a draft token, as a share of a row's time. That time is the duration of a pass of
`FULL_BATCH` rows without drafts, divided by `FULL_BATCH`."""
FULL_BATCH = 128
OPTIMISM = 0.5
"""Standard deviations by which the cost of drafts is taken below its expectation."""
_NOISE, _LEAST_NOISE, _NOISE_PASSES = 0.2, 0.02, 32
"""Relative standard deviation of a pass's time: the first guess, the least value, and the number of
passes without drafts that its average covers."""
_PROMPTS = np.eye(7)[4]
_PLAIN, _DRAFTS = slice(0, 5), slice(5, 7)


def pass_content(
    num_scheduled: np.ndarray, num_computed: np.ndarray, num_prompt: np.ndarray
) -> np.ndarray:
    """Return the factors of the coefficients for one pass: 1, the first decoding rows, the rows
    beyond those, their context, prompt tokens, rows that verify drafts, draft tokens.

    `num_scheduled`: int [rows], tokens of each request in the pass.
    `num_computed`: int [rows], tokens whose keys and values are already computed.
    `num_prompt`: int [rows], tokens of the prompt.
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
        """`plain_share`: share of the time that is reserved for passes without drafts."""
        self.coefficients = _PRIOR.copy()
        self.num_learnt = 0
        self._plain_share = plain_share
        self._covariance = np.diag(_PRIOR_SCALE**2)
        self._speed = np.array([PRIOR_S, PRIOR_S, PRIOR_S**2])
        """Sums over passes without drafts, earlier ones with less weight: measured seconds,
        expected seconds, squared errors."""
        self._noise = _NOISE**2
        """Relative variance of the time of passes without drafts."""
        self._num_drafted = 0
        """Number of passes with drafts that were learnt from."""
        self._first: list[float] = []
        """Time of the first passes without drafts, as multiples of what was expected."""
        self._pass_s = 0.0
        """Mean time of recent passes."""
        self._num_since_plain = 0
        self._after_drafts = False
        """Whether the last pass had drafts."""
        self._num_outliers = {True: 0, False: 0}
        """Current run of outliers among passes with drafts, and among those without."""
        self._drafting = np.ones(2)
        """Recent rows that drafted, and all rows of their passes."""
        self._began_s: float | None = None
        self._seconds = {"decode_s": 0.0, "verify_s": 0.0}

    def step_s(
        self, batch: int, context_tokens: float, num_rows: np.ndarray, num_tokens: np.ndarray
    ) -> np.ndarray:
        row_s = self._row_s(context_tokens / batch)
        if not self._num_drafted:
            self._suppose(row_s)
        d, e = np.maximum(self.coefficients[_DRAFTS], 0.0)
        # Use the lower bound of the cost of drafts, so that unknown costs are tried and learnt.
        (dd, de), (_, ee) = self._covariance[_DRAFTS, _DRAFTS]
        variance = dd * num_rows**2 + 2.0 * de * num_rows * num_tokens + ee * num_tokens**2
        drafts_s = d * num_rows + e * num_tokens - OPTIMISM * np.sqrt(np.maximum(variance, 0.0))
        drafts_s = np.maximum(drafts_s, LEAST_SHARE * row_s * num_tokens)
        return self._decoding_s(batch, context_tokens) + drafts_s

    @property
    def costs(self) -> tuple[float, ...]:
        """Seconds in the order of `schemas.counts.DraftingCounts.step_costs`; empty while they are
        little more than the prior."""
        if self.num_learnt < WARM_UP_STEPS:
            return ()
        *plain, _, d, e = np.maximum(self.coefficients, 0.0).tolist()
        drafting, rows = self._drafting.tolist()
        return (*(self.speed * each for each in plain), d * drafting / rows, e)

    @property
    def speed(self) -> float:
        """Time of recent passes without drafts, as a multiple of what the coefficients predict."""
        return float(self._speed[0] / self._speed[1])

    @property
    def plain_error(self) -> float:
        """Standard error of the predicted time of passes without drafts, as a share of it."""
        return hypot(MODEL_ERROR, float(np.sqrt(self._speed[2]) / self._speed[1]))

    def plain_is_due(self, now_s: float) -> bool:
        """Return whether to draft nothing now. `now_s` is of a clock that the machine's engines
        share."""
        if not self._plain_share:
            return False
        slot_s = PLAIN_PERIOD_S * self._plain_share
        doublings = max(0, ceil(log2(max(SLOT_PASSES * self._pass_s, slot_s) / slot_s)))
        period_s = PLAIN_PERIOD_S * 2**doublings
        return len(self._first) < FIRST_PLAIN or now_s % period_s < self._plain_share * period_s

    def state(self) -> dict[str, list]:
        """Return the state that `restore` takes."""
        return {
            "coefficients": self.coefficients.tolist(),
            "covariance": self._covariance.tolist(),
            "speed": self._speed.tolist(),
            "drafts": [self._num_drafted, self._noise],
        }

    def restore(self, state: Mapping[str, list]) -> None:
        """Start from the state of another instance. Raise ValueError if it has another format."""
        own = {name: np.array(values) for name, values in self.state().items()}
        given = {name: np.array(state.get(name, ()), float) for name in own}
        if any(given[name].shape != own[name].shape for name in own):
            raise ValueError("step times of another version")
        self.coefficients, self._covariance, self._speed, drafts = given.values()
        self._num_drafted, self._noise = int(drafts[0]), float(drafts[1])

    def take(self) -> dict[str, float]:
        """Return the seconds of passes since the last call, by whether they decode or verify. The
        time spent on prompts is subtracted."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    def pass_begins(self, now_s: float) -> None:
        self._began_s = now_s

    def pass_ended(self, now_s: float, content: np.ndarray) -> None:
        """Learn from a finished pass. `content`: see `pass_content`. A pass that decodes nothing
        teaches nothing, because the engine may have been idle before it."""
        began_s, self._began_s = self._began_s, None
        if began_s is None or not content[1]:
            return
        seconds = now_s - began_s
        self._pass_s += (seconds - self._pass_s) / (PASS_MEAN if self._pass_s else 1)
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
        """Return whether to learn from a pass. Outliers teach nothing unless they last. Lasting
        outliers with drafts still teach nothing while passes without drafts are outliers too: then
        the machine is slow, not the drafts."""
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
        """Return the time of a row in a full batch of rows with this context."""
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
        if len(self._first) < FIRST_PLAIN:
            self._first.append(seconds / plain_s)
            if len(self._first) == FIRST_PLAIN:
                self._speed[0] *= median(self._first)
            return
        # Changes common to all passes go into `speed`, so the coefficients keep the shape of many
        # passes.
        self._fit(_PLAIN, content, seconds / self.speed, noise_s / self.speed)

    def _suppose(self, row_s: float) -> None:
        """Set the prior of drafts before the first pass with drafts."""
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
