"""Held-out accuracy is deterministic, keeps test points out of the fit, and shows bad fits."""

from refrain.engines.latency.accuracy import (
    between_batches_accuracy,
    held_out_accuracy,
    split_points,
)
from refrain.engines.latency.analytic import LOOKUP_S, AnalyticLatency
from refrain.engines.latency.hardware import A40
from refrain.engines.latency.model_shape import SHAPES
from refrain.schemas.latency import PointKind
from tests.latency.machines import AffineMachine, measure

A40_LLAMA = AnalyticLatency(
    SHAPES["LLaMA3.1-8B"], A40, {"small": SHAPES["Qwen2.5-0.5B"], "lookup": LOOKUP_S}
)


def test_the_split_is_a_partition_that_keeps_the_ends():
    profile = measure(AffineMachine(), noise=0.1)
    kept, held_out = split_points(profile)
    assert split_points(profile) == (kept, held_out)
    assert sorted(map(str, kept + held_out)) == sorted(map(str, profile.points))
    assert {point.kind for point in held_out} == set(PointKind)
    assert 0.1 < len(held_out) / len(profile.points) < 0.3
    assert all(accuracy.num_extrapolated == 0 for accuracy in held_out_accuracy(profile))


def test_repeats_are_withheld_together():
    profile = measure(AffineMachine())
    twice = profile.model_copy(update={"points": profile.points * 2})
    kept, held_out = split_points(twice)
    assert not set(map(str, kept)) & set(map(str, held_out))


def test_an_affine_machine_is_predicted_exactly_and_noise_shows():
    exact = held_out_accuracy(measure(AffineMachine()))
    assert [accuracy.kind for accuracy in exact] == list(PointKind)
    assert all(accuracy.p90_error < 1e-6 for accuracy in exact)
    noisy = held_out_accuracy(measure(AffineMachine(), noise=0.05))
    assert all(0.005 < accuracy.median_error < 0.1 for accuracy in noisy)
    wild = held_out_accuracy(measure(AffineMachine(), noise=0.5))
    assert all(accuracy.median_error > 0.1 for accuracy in wild)


def test_a_machine_with_a_roofline_is_predicted_within_ten_percent():
    """The fit is piecewise linear, and a roofline bends: the errors must still be small."""
    profile = measure(A40_LLAMA, noise=0.02)
    by_kind = {accuracy.kind: accuracy for accuracy in held_out_accuracy(profile)}
    assert all(accuracy.median_error < 0.1 for accuracy in by_kind.values())
    between = between_batches_accuracy(profile)
    assert [accuracy.kind for accuracy in between] == [PointKind.DECODE, PointKind.PREFILL]
    assert all(accuracy.median_error < 0.1 for accuracy in between)
