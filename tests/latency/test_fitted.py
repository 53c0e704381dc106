"""The fit is exact at measured points, plausible between and beyond them, and marks
extrapolation."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refrain.engines.latency.fitted import FittedLatency, predict
from refrain.schemas.latency import PointKind, Profile, ProfilePoint
from tests.latency.machines import (
    BATCHES,
    LENGTHS,
    MAX_ACTIVE_TOKENS,
    AffineMachine,
    measure,
    profile_of,
)

MACHINE = AffineMachine()
EXACT = FittedLatency(measure(MACHINE))
NOISY = FittedLatency(measure(MACHINE, noise=0.05))

batches = st.integers(1, 256)
contexts = st.floats(2048, 8192)
windows = st.integers(0, 8)
times = st.floats(1e-6, 10.0)


def decode_points(curves: dict[int, dict[int, float]]) -> list[ProfilePoint]:
    return [
        ProfilePoint(kind=PointKind.DECODE, batch=batch, context_tokens=context, seconds=seconds)
        for batch, curve in curves.items()
        for context, seconds in curve.items()
    ]


@st.composite
def grids(draw, ordered: bool):
    """Draw decode curves by batch on any grid. With `ordered`, times rise with the context."""
    curves = {}
    for batch in draw(st.sets(st.integers(1, 64), min_size=2, max_size=5)):
        xs = sorted(draw(st.sets(st.integers(1, 10_000), min_size=2, max_size=6)))
        seconds = [draw(times) for _ in xs]
        curves[batch] = dict(zip(xs, sorted(seconds) if ordered else seconds, strict=True))
    return curves


@given(grids(ordered=True))
def test_decode_is_exact_where_it_was_measured(curves):
    points = decode_points(curves)
    latency = FittedLatency(profile_of(points))
    for point in points:
        estimate = predict(latency, point)
        assert estimate.seconds == pytest.approx(point.seconds, rel=1e-9)
        assert not estimate.extrapolated


@given(grids(ordered=False), st.integers(1, 100), st.floats(0, 2e4), st.floats(0, 2e4))
def test_decode_is_positive_and_never_falls_with_the_context(curves, batch, one, other):
    latency = FittedLatency(profile_of(decode_points(curves)))
    less, more = (latency.decode_s(1, batch, context) for context in sorted((one, other)))
    assert 0 < less <= more * (1 + 1e-9)


@given(grids(ordered=True), st.data())
def test_between_two_batches_the_time_is_between_theirs(curves, data):
    latency = FittedLatency(profile_of(decode_points(curves)))
    known = sorted(curves)
    batch = data.draw(st.integers(known[0], known[-1]))
    context = data.draw(st.integers(1, 10_000))
    below = max(b for b in known if b <= batch)
    above = min(b for b in known if b >= batch)
    ends = [latency.decode_s(1, b, context) for b in (below, above)]
    seconds = latency.decode_s(1, batch, context)
    assert min(ends) * (1 - 1e-9) <= seconds <= max(ends) * (1 + 1e-9)


@given(st.integers(1, 600), st.integers(1, 32768))
@example(batch=48, length=8193)
def test_extrapolation_is_marked(batch, length):
    estimate = EXACT.decode_estimate(1, batch, batch * length)
    inside = batch <= 256 and 8 <= length <= 16384 and batch * length <= MAX_ACTIVE_TOKENS
    # Near the cap some points of the grid are missing.
    corner = inside and min(b for b in BATCHES if b >= batch) * min(
        n for n in LENGTHS if n >= length
    )
    if corner <= MAX_ACTIVE_TOKENS:
        assert estimate.extrapolated == (not inside)


@given(st.integers(1, 600), st.integers(1, 32768))
def test_reaches_ignores_lower_bounds(batch, length):
    estimate = EXACT.decode_estimate(1, batch, batch * length)
    reaches = EXACT.reaches(1, batch, batch * length)
    assert reaches == (not estimate.extrapolated) or length < min(LENGTHS)
    assert reaches or estimate.extrapolated
    assert EXACT.reaches(1, min(batch, 256), 0)


def test_beyond_the_profile_times_keep_growing():
    assert EXACT.decode_s(1, 512, 4e5) > EXACT.decode_s(1, 256, 4e5)
    beyond = EXACT.decode_estimate(1, 8, 2**20)
    assert beyond.extrapolated
    assert beyond.seconds == pytest.approx(MACHINE.decode_s(1, 8, 2**20), rel=1e-6)
    assert EXACT.prefill_s(1, 1, 32768) == pytest.approx(MACHINE.prefill_s(1, 1, 32768), rel=1e-6)
    assert EXACT.verify_estimate(1, 8, 8192, 16).extrapolated
    assert EXACT.verify_s(1, 8, 8192, 16) == pytest.approx(MACHINE.verify_s(1, 8, 8192, 16))
    assert EXACT.draft_estimate("small", 300, 4).extrapolated


@given(st.sampled_from([1, 2]), batches, contexts, windows)
def test_a_machine_of_the_models_form_is_recovered(tp, batch, length, window):
    context = min(batch * length, MAX_ACTIVE_TOKENS)
    assert EXACT.verify_s(tp, batch, context, window) == pytest.approx(
        MACHINE.verify_s(tp, batch, context, window), rel=1e-6
    )
    assert EXACT.prefill_s(tp, batch, length) == pytest.approx(
        MACHINE.prefill_s(tp, batch, length), rel=1e-6
    )
    assert EXACT.draft_s("small", batch, window) == pytest.approx(
        MACHINE.draft_s("small", batch, window), rel=1e-6
    )


@settings(max_examples=300)
@given(st.sampled_from([1, 2]), batches, contexts, windows)
def test_with_noise_a_machine_is_recovered_within_ten_percent(tp, batch, length, window):
    context = min(batch * length, MAX_ACTIVE_TOKENS)
    measured = NOISY.verify_s(tp, batch, context, window)
    assert measured == pytest.approx(MACHINE.verify_s(tp, batch, context, window), rel=0.1)


@given(batches, contexts, windows)
def test_verify_and_draft_never_fall_with_the_window(batch, context, window):
    assert NOISY.verify_s(1, batch, context, 0) == NOISY.decode_s(1, batch, context)
    assert NOISY.draft_s("small", batch, 0) == 0.0
    more = NOISY.verify_s(1, batch, context, window + 1)
    assert more >= NOISY.verify_s(1, batch, context, window) - 1e-12
    assert NOISY.draft_s("small", batch, window + 1) >= NOISY.draft_s("small", batch, window)


def test_repeats_of_a_point_are_averaged_by_their_number():
    grid = {1: {10: 1.0, 20: 2.0}, 2: {10: 1.0, 20: 2.0}}
    again = ProfilePoint(
        kind=PointKind.DECODE, batch=1, context_tokens=10, seconds=1.4, num_repeats=3
    )
    latency = FittedLatency(profile_of([*decode_points(grid), again]))
    assert latency.decode_s(1, 1, 10) == pytest.approx(1.3)


def test_a_profile_survives_json():
    profile = measure(MACHINE, noise=0.05)
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


def test_missing_points_are_named():
    with pytest.raises(ValueError, match="toy on made up has no decode points"):
        FittedLatency(profile_of([]))
    with pytest.raises(ValueError, match="no decode points at tp_degree 8; known: 1, 2"):
        EXACT.decode_s(8, 1, 100)
    with pytest.raises(ValueError, match="no drafter 'eagle'; known: lookup, small"):
        EXACT.draft_s("eagle", 1, 2)
    with pytest.raises(ValueError, match="no drafter 'histospec'; known: lookup, small"):
        EXACT.draft_s("histospec", 1, 2)
    only_decode = FittedLatency(profile_of(decode_points({1: {1: 1, 2: 1}, 2: {1: 1, 2: 1}})))
    with pytest.raises(ValueError, match="no prefill points at tp_degree 1; known: none"):
        only_decode.prefill_s(1, 1, 10)
    with pytest.raises(ValueError, match="no verify points"):
        only_decode.verify_s(1, 1, 10, 2)


def test_too_few_points_are_refused():
    with pytest.raises(ValueError, match="only batch 4 was profiled; at least 2"):
        FittedLatency(profile_of(decode_points({4: {1: 1.0, 2: 2.0}})))
    with pytest.raises(ValueError, match="batch 8: 1 length was profiled; at least 2"):
        FittedLatency(profile_of(decode_points({4: {1: 1.0, 2: 2.0}, 8: {1: 1.0}})))
    draft = ProfilePoint(kind=PointKind.DRAFT, batch=1, window=2, drafter="d", seconds=1.0)
    grid = decode_points({1: {1: 1, 2: 1}, 2: {1: 1, 2: 1}})
    with pytest.raises(ValueError, match="draft by d, window 2: 1 batch size was profiled"):
        FittedLatency(profile_of([*grid, draft]))


@pytest.mark.parametrize(
    ("batch", "context", "window"), [(0, 10, 0), (1, -1, 0), (1, float("nan"), 0), (1, 10, -1)]
)
def test_impossible_steps_are_refused(batch, context, window):
    with pytest.raises(ValueError, match="at least"):
        EXACT.verify_s(1, batch, context, window)


def test_history_takes_as_long_as_ngram_unless_it_was_measured():
    def renamed(**names: str) -> FittedLatency:
        points = measure(MACHINE).points
        return FittedLatency(
            profile_of(
                p.model_copy(update={"drafter": names[p.drafter]}) if p.drafter else p
                for p in points
            )
        )

    at = (32, 4)
    alike = renamed(lookup="ngram", small="small")
    assert alike.draft_s("histospec", *at) == alike.draft_s("ngram", *at)
    assert alike.drafters == ("ngram", "small")
    measured = renamed(lookup="ngram", small="histospec")
    assert measured.draft_s("histospec", *at) > 2 * measured.draft_s("ngram", *at)
