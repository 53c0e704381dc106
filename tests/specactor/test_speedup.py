"""At which batch sizes and acceptances drafting pays."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.latency.analytic import LOOKUP_S, AnalyticLatency
from refrain.engines.latency.expectation import expected_tokens
from refrain.engines.latency.hardware import H800
from refrain.engines.latency.model_shape import SHAPES
from refrain.engines.specactor.ladder import Ladder

LATENCY = AnalyticLatency(
    SHAPES["Qwen2.5-32B"], H800, {"0.5B": SHAPES["Qwen2.5-0.5B"], "history": LOOKUP_S}
)
MODEL, HISTORY = "0.5B", "history"
LADDER = Ladder(LATENCY, 4, (MODEL, HISTORY), context_tokens_each=4096, max_window=8)

drafters = st.sampled_from(LADDER.drafters)
batches = st.integers(1, 1024)
acceptances = st.floats(0, 1)


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


@given(drafters, batches, acceptances)
def test_not_drafting_is_the_unit_and_the_least(drafter, batch, acceptance):
    assert LADDER.speedup(drafter, acceptance, batch, 0) == 1.0
    assert LADDER.best(drafter, acceptance, batch).speedup >= 1.0


@given(drafters, batches, acceptances, acceptances)
def test_more_acceptance_never_slows_down(drafter, batch, one, other):
    slow, fast = (LADDER.best(drafter, p, batch).speedup for p in sorted((one, other)))
    assert slow <= fast * (1 + 1e-12)


def test_large_batches_stop_paying():
    """SpecActor figure 6b and RhymeRL 5.4: verification becomes bound by computation."""
    early = replace(LADDER, context_tokens_each=1024)
    small, large = (early.best(MODEL, 0.6, batch) for batch in (1, 512))
    assert small.speedup > 1.2
    assert large == (0, 1.0)
    surface = early.surfaces([1, 64, 128, 256, 512], [0.0, 0.6, 0.8])[MODEL]
    assert surface.batches == (1, 64, 128, 256, 512)
    assert surface.speedups.shape == (5, 3)
    assert surface.max_paying_batch(0.0) == surface.max_paying_batch(0.59) == 0
    assert 0 < surface.max_paying_batch(0.6) <= surface.max_paying_batch(0.99)
    assert early.best(MODEL, 0.8, 1).window >= early.best(MODEL, 0.8, 256).window
