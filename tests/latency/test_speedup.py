"""Where drafting pays."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from engines.latency.analytic import LOOKUP_S, AnalyticLatency
from engines.latency.hardware import H800
from engines.latency.model_shape import SHAPES
from engines.latency.speedup import Drafting, SpeedupSurface, expected_tokens

LATENCY = AnalyticLatency(
    SHAPES["Qwen2.5-32B"], H800, {"0.5B": SHAPES["Qwen2.5-0.5B"], "history": LOOKUP_S}
)
MODEL = Drafting(LATENCY, 4, "0.5B", context_tokens_each=4096, max_window=8)
HISTORY = Drafting(LATENCY, 4, "history", context_tokens_each=4096, max_window=8)

draftings = st.sampled_from([MODEL, HISTORY])
batches = st.integers(1, 1024)
acceptances = st.floats(0, 1)


def break_even_acceptance(drafting: Drafting, batch: int) -> float | None:
    """Acceptance above which drafting pays; None where even p = 1 does not. The speed-up of every
    window is continuous and rising in p, so its root is unique."""

    def gain(acceptance: float) -> float:
        windows = range(1, drafting.max_window + 1)
        return max(drafting.speedup(batch, acceptance, window) for window in windows) - 1.0

    if gain(0.0) >= 0.0:
        return 0.0
    return float(brentq(gain, 0.0, 1.0)) if gain(1.0) > 0.0 else None


def test_expected_tokens():
    assert expected_tokens(0, 0.3) == 1.0
    assert expected_tokens(3, 0.5) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert expected_tokens(4, 1.0) == 5.0
    for window, acceptance in ((-1, 0.5), (2, 1.1), (2, float("nan"))):
        with pytest.raises(ValueError, match="acceptance"):
            expected_tokens(window, acceptance)


@given(st.integers(0, 12), acceptances)
def test_expected_tokens_is_the_mean_over_where_the_first_mismatch_falls(window, p):
    mean = sum(p**a * (1 - p) * (a + 1) for a in range(window)) + p**window * (window + 1)
    assert expected_tokens(window, p) == pytest.approx(mean)


@given(draftings, batches)
def test_nothing_accepted_never_pays(drafting, batch):
    assert not drafting.pays(batch, 0.0)
    assert drafting.best_window(batch, 0.0) == (0, 1.0)


@given(draftings, batches, acceptances)
def test_not_drafting_is_the_unit_and_the_least(drafting, batch, acceptance):
    assert drafting.speedup(batch, acceptance, 0) == 1.0
    assert drafting.best_window(batch, acceptance).speedup >= 1.0


@given(draftings, batches, acceptances, acceptances)
def test_more_acceptance_never_slows_down(drafting, batch, one, other):
    low, high = sorted((one, other))
    assert drafting.best_window(batch, low).speedup <= drafting.best_window(batch, high).speedup * (
        1 + 1e-12
    )


@given(draftings, batches)
def test_break_even_is_where_paying_begins(drafting, batch):
    acceptance = break_even_acceptance(drafting, batch)
    if acceptance is None:
        assert not drafting.pays(batch, 1.0)
    else:
        assert not drafting.pays(batch, max(0.0, acceptance - 1e-6))
        assert drafting.pays(batch, min(1.0, acceptance + 1e-6))


def test_large_batches_stop_paying():
    """SpecActor figure 6b and RhymeRL 5.4: verification becomes bound by computation."""
    early = replace(MODEL, context_tokens_each=1024)
    small, large = (early.best_window(batch, 0.6) for batch in (1, 512))
    assert small.speedup > 1.2
    assert large == (0, 1.0)
    surface = SpeedupSurface.compute(early, [1, 64, 512, 256, 128], [0.0, 0.8, 0.6])
    assert surface.batches == (1, 64, 128, 256, 512)
    assert surface.speedups.shape == surface.windows.shape == (5, 3)
    assert surface.max_paying_batch(0.0) == surface.max_paying_batch(0.59) == 0
    assert 0 < surface.max_paying_batch(0.6) <= surface.max_paying_batch(0.99)
    assert surface.max_paying_batch(0.8, min_speedup=9.0) == 0
    assert surface.windows[0, 2] >= surface.windows[3, 2]


def test_cheap_drafts_pay_earlier():
    assert break_even_acceptance(HISTORY, 64) < break_even_acceptance(MODEL, 64)


def test_an_empty_grid_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        SpeedupSurface.compute(MODEL, [], [0.5])
