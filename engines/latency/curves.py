"""Building blocks of a fitted latency model: curves, surfaces, affine functions.

Fits use numpy and scipy: `numpy.interp` between knots, `scipy.optimize.isotonic_regression` for
curves that never fall, `scipy.optimize.nnls` for affine functions that never fall.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression, nnls


class Estimate(NamedTuple):
    """Predicted time."""

    seconds: float
    extrapolated: bool
    """Whether the point lies outside the measured region."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over x: linear between knots, constant below the first, slope `end_slope` above the
    last.

    With `log_log`, knots and values are logarithms, so that the pieces are power laws.
    """

    low: float
    """Least x measured."""
    high: float
    """Largest x measured."""
    knots: np.ndarray
    values: np.ndarray
    end_slope: float
    log_log: bool

    def at(self, x: float) -> float:
        u = float(np.log(max(x, self.low))) if self.log_log else x
        value = float(np.interp(u, self.knots, self.values))
        value += self.end_slope * max(0.0, u - float(self.knots[-1]))
        return float(np.exp(value)) if self.log_log else value

    def points(self) -> list[tuple[float, float]]:
        """Return (x, seconds) of each knot."""
        pairs = zip(self.knots.tolist(), self.values.tolist(), strict=True)
        return [(float(np.exp(u)), float(np.exp(v))) if self.log_log else (u, v) for u, v in pairs]


def linear_curve(xs: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> Curve:
    """Fit a piecewise linear curve that never falls. Beyond the last knot it has the least-squares
    slope."""
    values = isotonic_regression(seconds, weights=weights).x
    slope = float(np.polyfit(xs, values, 1)[0])
    return Curve(float(xs[0]), float(xs[-1]), xs, values, max(0.0, slope), log_log=False)


def power_curve(xs: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> Curve:
    """Fit a piecewise power law that never falls. Beyond the last knot its power is between 1 and
    2."""
    knots = np.log(xs)
    values = isotonic_regression(np.log(seconds), weights=weights).x
    slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
    end_slope = float(np.clip(slope, 1.0, 2.0))
    return Curve(float(xs[0]), float(xs[-1]), knots, values, end_slope, log_log=True)


@dataclass(frozen=True, slots=True)
class Surface:
    """Seconds over (batch, x), interpolated between the curves of the two nearest batch sizes.

    Below the least batch size, its curve holds. Above the largest, its curve is scaled by the
    growth from the batch size before, at least 0 and at most proportional to the batch. An estimate
    is extrapolated if its batch lies outside the batch sizes, or its x outside the ranges of the
    two curves, which are interpolated at the batch.
    """

    batches: tuple[int, ...]
    """Batch sizes, ascending, at least two."""
    curves: tuple[Curve, ...]

    def at(self, batch: int, x: float) -> Estimate:
        left, right, start, end = self._around(batch)
        share = (batch - start) / (end - start)
        inside = min(max(share, 0.0), 1.0)
        low = left.low + inside * (right.low - left.low)
        high = left.high + inside * (right.high - left.high)
        seconds = left.at(x)
        if inside > 0.0:
            seconds += inside * (right.at(x) - seconds)
        if share > 1.0:
            seconds *= 1.0 + self._end_growth() * (batch - end)
        return Estimate(seconds, share != inside or not low <= x <= high)

    def reaches(self, batch: int, x: float) -> bool:
        """Return whether neither batch nor x lies above the measured range."""
        left, right, start, end = self._around(batch)
        share = max(0.0, (batch - start) / (end - start))
        return share <= 1.0 and x <= left.high + share * (right.high - left.high)

    def _around(self, batch: int) -> tuple[Curve, Curve, int, int]:
        """Return the two nearest curves, and their batch sizes."""
        index = min(max(bisect_right(self.batches, batch) - 1, 0), len(self.batches) - 2)
        left, right = self.curves[index : index + 2]
        start, end = self.batches[index : index + 2]
        return left, right, start, end

    def knots(self) -> list[tuple[int, int, float, float]]:
        """Return (batch, window 0, x, seconds) of each knot."""
        curves = zip(self.batches, self.curves, strict=True)
        return [(batch, 0, *point) for batch, curve in curves for point in curve.points()]

    def _end_growth(self) -> float:
        """Return the relative growth per sequence between the last two batch sizes, midway along
        the last curve.

        The growth is the same for all x, so that times beyond the last batch size never fall along
        x.
        """
        left, right = self.curves[-2:]
        middle = (right.low + right.high) / 2
        start, end = self.batches[-2:]
        growth = (1.0 - left.at(middle) / right.at(middle)) / (end - start)
        return min(max(growth, 0.0), 1.0 / end)


@dataclass(frozen=True, slots=True)
class WindowedAffine:
    """Seconds = intercept(window) + slope(window) * batch, both linear between windows.

    Window 0 costs nothing. Beyond the largest window both keep growing, at the rate over the last
    two windows or at the average rate from 0, whichever is larger.
    """

    windows: np.ndarray
    """Draft windows, ascending, from 0."""
    coefficients: np.ndarray
    """Intercept and slope of each window; [num_windows, 2], never falling along the windows."""
    min_batch: int
    max_batch: int

    def at(self, batch: int, window: int) -> Estimate:
        last, growth = self.windows[-1], self._growth()
        intercept, slope = (
            float(np.interp(window, self.windows, column) + growth[i] * max(0, window - last))
            for i, column in enumerate(self.coefficients.T)
        )
        outside = window > last or not self.min_batch <= batch <= self.max_batch
        return Estimate(intercept + slope * batch, bool(outside))

    def knots(self) -> list[tuple[int, int, float, float]]:
        """Return (batch, window, batch, seconds) at the ends of each window's line."""
        return [
            (batch, window, batch, self.at(batch, window).seconds)
            for window in map(int, self.windows[1:])
            for batch in (self.min_batch, self.max_batch)
        ]

    def _growth(self) -> np.ndarray:
        recent = (self.coefficients[-1] - self.coefficients[-2]) / (
            self.windows[-1] - self.windows[-2]
        )
        return np.maximum(recent, self.coefficients[-1] / self.windows[-1])


def fit_windowed_affine(
    batches: np.ndarray, windows: np.ndarray, seconds: np.ndarray, weights: np.ndarray
) -> WindowedAffine:
    """Fit by weighted least squares a cost that never falls with batch or window. All arrays are
    [num_points].

    The unknowns are the increments of intercept and slope from each window to the next.
    Non-negative least squares keeps all of them at least 0.
    """
    knots = np.unique(windows)
    reached = (windows[:, None] >= knots[None, :]).astype(float)
    design = np.concatenate([reached, reached * batches[:, None]], axis=1) * weights[:, None]
    increments, _ = nnls(design, seconds * weights)
    coefficients = np.cumsum(increments.reshape(2, len(knots)), axis=1).T
    return WindowedAffine(
        windows=np.concatenate([[0], knots]),
        coefficients=np.concatenate([np.zeros((1, 2)), coefficients]),
        min_batch=int(batches.min()),
        max_batch=int(batches.max()),
    )
