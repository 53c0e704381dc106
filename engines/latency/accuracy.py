"""Error of the fit on points that it did not see (PAT 5.5 reports 3 to 4 %).

Two deterministic tests:
- `held_out_accuracy` withholds every fourth inner point of the curves. Is a curve right between its
  knots? First and last points stay, so withheld points are never extrapolated.
- `between_batches_accuracy` withholds each inner batch size in turn, with all its points. Is the
  interpolation between batch sizes right?

PAT compares throughput along real trajectories; here both sides are measured points.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import numpy as np

from refrain.engines.latency.fitted import FittedLatency, predict
from refrain.schemas.latency import Accuracy, PointKind, Profile, ProfilePoint

Points = tuple[ProfilePoint, ...]
Pairs = list[tuple[ProfilePoint, FittedLatency]]


def held_out_accuracy(profile: Profile) -> tuple[Accuracy, ...]:
    """Return the accuracy by kind on every fourth inner point. Kinds without inner points are left
    out."""
    return _summarize(_pairs(profile, *split_points(profile)))


def between_batches_accuracy(profile: Profile) -> tuple[Accuracy, ...]:
    """Return the accuracy of decode and prefill at batch sizes that are withheld one at a time."""
    pairs: Pairs = []
    for kind in (PointKind.DECODE, PointKind.PREFILL):
        batches = defaultdict(set)
        for point in profile.of_kind(kind):
            batches[point.tp_degree].add(point.batch)
        for tp_degree, at_tp in sorted(batches.items()):
            for batch in sorted(at_tp)[1:-1]:
                at = (kind, tp_degree, batch)
                pairs += _pairs(profile, *_partition(profile.points, partial(_is_at, at)))
    return _summarize(pairs)


def split_points(profile: Profile) -> tuple[Points, Points]:
    """Split the points into those to fit and those to compare with. The split depends only on
    position, so equal grids split alike. Repeats of one point stay together."""
    curves = defaultdict(set)
    for point in profile.points:
        curves[_curve_key(point)].add(_position(point))
    inner = defaultdict(list)
    for key, positions in sorted(curves.items()):
        inner[key[0]] += [(key, position) for position in sorted(positions)[1:-1]]
    withheld = {spot for spots in inner.values() for spot in spots[2::4]}
    return _partition(profile.points, lambda p: (_curve_key(p), _position(p)) in withheld)


def _pairs(profile: Profile, kept: Points, left_out: Points) -> Pairs:
    """Return each withheld point with the model fitted without all of them."""
    latency = FittedLatency(profile.model_copy(update={"points": kept}))
    return [(point, latency) for point in left_out]


def _is_at(at: tuple[PointKind, int, int], point: ProfilePoint) -> bool:
    return (point.kind, point.tp_degree, point.batch) == at


def _partition(
    points: Points, is_withheld: Callable[[ProfilePoint], bool]
) -> tuple[Points, Points]:
    kept = tuple(point for point in points if not is_withheld(point))
    return kept, tuple(point for point in points if is_withheld(point))


def _curve_key(point: ProfilePoint) -> tuple[PointKind, str, int, int]:
    is_affine = point.kind in (PointKind.VERIFY, PointKind.DRAFT)
    across = point.window if is_affine else point.batch
    return point.kind, point.drafter or "", point.tp_degree, across


def _position(point: ProfilePoint) -> float:
    if point.kind in (PointKind.VERIFY, PointKind.DRAFT):
        return point.batch
    return point.rms_tokens or point.context_tokens


def _summarize(pairs: Pairs) -> tuple[Accuracy, ...]:
    by_kind = defaultdict(list)
    for point, latency in pairs:
        by_kind[point.kind].append((point, predict(latency, point)))
    return tuple(_accuracy(kind, by_kind[kind]) for kind in PointKind if kind in by_kind)


def _accuracy(kind: PointKind, predictions: list) -> Accuracy:
    errors = [abs(guess.seconds - point.seconds) / point.seconds for point, guess in predictions]
    return Accuracy(
        kind=kind,
        num_points=len(errors),
        num_extrapolated=sum(guess.extrapolated for _, guess in predictions),
        median_error=float(np.median(errors)),
        p90_error=float(np.percentile(errors, 90)),
    )
