"""Latency model fitted to a profile.

    decode(tp, B, T)     curve over T of each profiled batch size, interpolated along B
                         (PAT 4.2, Online Latency Predictor)
    prefill(tp, B, L)    the same over the root-mean-square length L = sqrt(sum L_i^2 / B)
                         (PAT 4.3, equations 3 and 4)
    verify(tp, B, T, w)  decode(tp, B, T) + B V'_w + beta_w
    draft(d, B, w)       B D'_dw + alpha_dw
                         (affine in the batch: SpecActor 4.1, Modeling TGS)

B: sequences, T: context tokens of all of them, w: draft window, all times in seconds.

Deviations:
- Decode curves never fall along T (isotonic regression). A fall is noise, and would make a policy
  believe that more context is cheaper. Along B falls are allowed, because such jumps are real (PAT
  5.5).
- PAT reads prefill off its table. Here it follows a power law between lengths, because the cost
  bends from linear to quadratic and straight pieces would overestimate it.
- SpecActor's V holds for one context length. Here V is added to decoding, so that verification
  follows the context and window 0 is exactly a decoding step. V is never negative.
- SpecActor's D is the time of one drafted token. Here each profiled window has its own line, which
  also fits drafters whose cost is not proportional to the window. Window 0 costs nothing.
- Drafting from history needs no profile. A lookup in an index costs about as much as n-gram
  drafting, both less than 1 ms for 256 sequences. Without points of its own, history takes the time
  of n-gram drafting.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from refrain.engines.latency.curves import (
    Curve,
    Estimate,
    Surface,
    WindowedAffine,
    fit_windowed_affine,
    linear_curve,
    power_curve,
)
from refrain.schemas.drafting import HISTORY, NGRAM
from refrain.schemas.latency import FitKnot, PointKind, Profile, ProfilePoint

Fit = TypeVar("Fit", Surface, WindowedAffine)
CurveFit = Callable[[np.ndarray, np.ndarray, np.ndarray], Curve]


class FittedLatency:
    """Predicted times from one `Profile`; implements `Latency` and `Bounded`, and marks
    extrapolation."""

    def __init__(self, profile: Profile):
        self.profile = profile
        self._name = f"the profile of {profile.model_name} on {profile.hardware}"
        if not profile.of_kind(PointKind.DECODE):
            raise ValueError(f"{self._name} has no decode points ({len(profile.points)} in all)")
        self._decode = _fit_surfaces(profile.of_kind(PointKind.DECODE), linear_curve)
        self._prefill = _fit_surfaces(profile.of_kind(PointKind.PREFILL), power_curve)
        self._verify = {
            tp_degree: _fit_affine(points, f"verify at tp_degree {tp_degree}", self._decode_part)
            for tp_degree, points in _by("tp_degree", profile.of_kind(PointKind.VERIFY)).items()
        }
        self._draft = {
            drafter: _fit_affine(points, f"draft by {drafter}", lambda _: 0.0)
            for drafter, points in _by("drafter", profile.of_kind(PointKind.DRAFT)).items()
        }

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """TP degrees with decode points, ascending."""
        return tuple(sorted(self._decode))

    @property
    def drafters(self) -> tuple[str, ...]:
        """Drafters with draft points."""
        return tuple(sorted(self._draft))

    def decode_estimate(self, tp_degree: int, batch: int, context_tokens: float) -> Estimate:
        _require_step(batch, context_tokens)
        return self._at_tp(self._decode, "decode", tp_degree).at(batch, context_tokens)

    def prefill_estimate(self, tp_degree: int, batch: int, rms_tokens: float) -> Estimate:
        _require_step(batch, rms_tokens)
        return self._at_tp(self._prefill, "prefill", tp_degree).at(batch, rms_tokens)

    def verify_estimate(
        self, tp_degree: int, batch: int, context_tokens: float, window: int
    ) -> Estimate:
        _require_window(window)
        decode = self.decode_estimate(tp_degree, batch, context_tokens)
        if window == 0:
            return decode
        extra = self._at_tp(self._verify, "verify", tp_degree).at(batch, window)
        return Estimate(decode.seconds + extra.seconds, decode.extrapolated or extra.extrapolated)

    def draft_estimate(self, drafter: str, batch: int, window: int) -> Estimate:
        _require_window(window)
        _require_step(batch, 0.0)
        measured = NGRAM if drafter == HISTORY and HISTORY not in self._draft else drafter
        if measured not in self._draft:
            known = ", ".join(self.drafters) or "none"
            raise ValueError(f"{self._name} has no drafter {drafter!r}; known: {known}")
        return self._draft[measured].at(batch, window)

    def reaches(self, tp_degree: int, batch: int, context_tokens: float) -> bool:
        return self._at_tp(self._decode, "decode", tp_degree).reaches(batch, context_tokens)

    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float:
        return self.decode_estimate(tp_degree, batch, context_tokens).seconds

    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float:
        return self.prefill_estimate(tp_degree, batch, rms_tokens).seconds

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        return self.verify_estimate(tp_degree, batch, context_tokens, window).seconds

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        return self.draft_estimate(drafter, batch, window).seconds

    def knots(self) -> list[FitKnot]:
        """Return the fit as a table. A verify or draft window has the two ends of its line."""
        fits = (
            (PointKind.DECODE, self._decode),
            (PointKind.PREFILL, self._prefill),
            (PointKind.VERIFY, self._verify),
            (PointKind.DRAFT, self._draft),
        )
        return [
            FitKnot(
                kind=kind,
                tp_degree=key if isinstance(key, int) else None,
                drafter=key if isinstance(key, str) else None,
                batch=batch,
                window=window,
                x=x,
                seconds=seconds,
            )
            for kind, by_key in fits
            for key, fit in by_key.items()
            for batch, window, x, seconds in fit.knots()
        ]

    def _decode_part(self, point: ProfilePoint) -> float:
        return self.decode_s(point.tp_degree, point.batch, point.context_tokens)

    def _at_tp(self, fits: dict[int, Fit], kind: str, tp_degree: int) -> Fit:
        if tp_degree not in fits:
            known = ", ".join(map(str, sorted(fits))) or "none"
            raise ValueError(
                f"{self._name} has no {kind} points at tp_degree {tp_degree}; known: {known}"
            )
        return fits[tp_degree]


def predict(latency: FittedLatency, point: ProfilePoint) -> Estimate:
    """Return the prediction of a measured point."""
    match point.kind:
        case PointKind.DECODE:
            return latency.decode_estimate(point.tp_degree, point.batch, point.context_tokens)
        case PointKind.PREFILL:
            return latency.prefill_estimate(point.tp_degree, point.batch, point.rms_tokens)
        case PointKind.VERIFY:
            return latency.verify_estimate(
                point.tp_degree, point.batch, point.context_tokens, point.window
            )
        case PointKind.DRAFT:
            return latency.draft_estimate(str(point.drafter), point.batch, point.window)


def _fit_surfaces(points: Sequence[ProfilePoint], fit_curve: CurveFit) -> dict[int, Surface]:
    return {tp: _fit_surface(at_tp, fit_curve) for tp, at_tp in _by("tp_degree", points).items()}


def _fit_surface(points: Sequence[ProfilePoint], fit_curve: CurveFit) -> Surface:
    batches = sorted({point.batch for point in points})
    label = f"{points[0].kind} at tp_degree {points[0].tp_degree}"
    if len(batches) < 2:
        raise ValueError(f"{label}: only batch {batches[0]} was profiled; at least 2 are needed")
    curves = []
    for batch in batches:
        xs, seconds, weights = _merge_repeats([p for p in points if p.batch == batch])
        if len(xs) < 2:
            raise ValueError(
                f"{label}, batch {batch}: 1 length was profiled; at least 2 are needed"
            )
        curves.append(fit_curve(xs, seconds, weights))
    return Surface(tuple(batches), tuple(curves))


def _merge_repeats(points: Sequence[ProfilePoint]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ascending lengths, their mean seconds, and the number of measured steps of each."""
    lengths = np.array([point.rms_tokens or point.context_tokens for point in points], dtype=float)
    repeats = np.array([point.num_repeats for point in points], dtype=float)
    xs, index = np.unique(lengths, return_inverse=True)
    weights = np.bincount(index, repeats)
    sums = np.bincount(index, repeats * np.array([point.seconds for point in points]))
    return xs, sums / weights, weights


def _fit_affine(
    points: Sequence[ProfilePoint], label: str, base_s: Callable[[ProfilePoint], float]
) -> WindowedAffine:
    """Fit an affine function by least squares of the relative error of `base_s` plus the
    function."""
    for window in sorted({point.window for point in points}):
        num_batches = len({point.batch for point in points if point.window == window})
        if num_batches < 2:
            raise ValueError(
                f"{label}, window {window}: 1 batch size was profiled; at least 2 are needed"
            )
    seconds = np.array([point.seconds for point in points])
    return fit_windowed_affine(
        batches=np.array([point.batch for point in points], dtype=float),
        windows=np.array([point.window for point in points]),
        seconds=seconds - np.array([base_s(point) for point in points]),
        weights=np.sqrt([point.num_repeats for point in points]) / seconds,
    )


def _by(field: str, points: Sequence[ProfilePoint]) -> dict[Any, list[ProfilePoint]]:
    groups = defaultdict(list)
    for point in points:
        groups[getattr(point, field)].append(point)
    return dict(groups)


def _require_step(batch: int, tokens: float) -> None:
    if batch < 1 or not tokens >= 0:
        raise ValueError(f"a step needs a batch of at least 1 and tokens >= 0: {batch}, {tokens}")


def _require_window(window: int) -> None:
    if window < 0:
        raise ValueError(f"a draft window is at least 0, not {window}")
