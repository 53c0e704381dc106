"""Predicted tokens per second of drafting, against a simulation of the protocol."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.latency.expectation import expected_tokens
from tests.specactor.expectations import (
    paper_tokens,
    paper_tokens_per_s,
    streamed_tokens_per_s,
    windowed_tokens,
    windowed_tokens_per_s,
)
from tests.specactor.machine import Machine

EXPECTATIONS = (paper_tokens_per_s, windowed_tokens_per_s, streamed_tokens_per_s)
WINDOWS = (1, 2, 3, 4, 6, 8, 12)
ACCEPTANCES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8)
NUM_STEPS = 1000

windows, acceptances = st.integers(1, 16), st.floats(0, 1)


@cache
def errors() -> dict[tuple, list[float]]:
    """Return the relative error of each of `EXPECTATIONS`, by (w, p, D / V)."""
    found = {}
    for point in product(WINDOWS, ACCEPTANCES, RATIOS):
        truth = Machine(*point, verify_s=1.0).run(NUM_STEPS).tokens_per_s
        found[point] = [abs(expect(*point, 1.0) / truth - 1) for expect in EXPECTATIONS]
    return found


def test_planning_uses_the_best_estimate():
    means = dict(zip(EXPECTATIONS, np.mean(list(errors().values()), axis=0), strict=True))
    assert min(means, key=means.__getitem__) is streamed_tokens_per_s
    assert means[streamed_tokens_per_s] < 0.03
    assert max(error[-1] for error in errors().values()) < 0.1
    assert means[paper_tokens_per_s] > 0.2


def test_whole_windows_are_a_fair_guess_where_the_drafter_keeps_up():
    near = [error for (w, _, ratio), error in errors().items() if w * ratio <= 1]
    paper, windowed, streamed = np.mean(near, axis=0)
    assert streamed < 0.02 < windowed < 0.06 < 0.1 < paper


def test_time_that_the_drafter_waits_is_lost():
    """Sometimes the drafter fills two windows less one within a step and must wait."""
    point = (3, 0.95, 0.35)
    truth = Machine(*point, verify_s=1.0).run(10_000).tokens_per_s
    assert streamed_tokens_per_s(*point, 1.0) == pytest.approx(truth, rel=0.02)


def test_at_most_two_windows_less_one_are_wasted():
    for window in (1, 2, 5):
        machine = Machine(window, 0.6, 0.01, 1.0).run(500)
        assert machine.most_wasted == 2 * window - 1


@settings(deadline=None)
@given(windows, acceptances)
def test_the_paper_s_sum(window, p):
    partial = sum(p**a * (1 - p) * (a + 1) / 2 for a in range(window))
    assert paper_tokens(window, p) == pytest.approx(partial + window * p**window)


@settings(deadline=None, max_examples=30)
@given(windows, st.floats(0, 0.95))
def test_whole_windows_are_a_renewal_process(window, p):
    """Sum over cycles: some whole windows, a partial one, and an empty step."""
    whole = p**window
    tokens = steps = 0.0
    for num_whole in range(1000):
        chance = whole**num_whole
        if chance < 1e-12:
            break
        for a in range(window):
            weight = chance * p**a * (1 - p)
            tokens += weight * (num_whole * window + a + 1 + 1)
            steps += weight * (num_whole + 1 + 1)
    assert windowed_tokens(window, p) == pytest.approx(tokens / steps, rel=1e-6)


def test_extremes():
    """With no token right, speed is that of plain decoding. With all right, the slower of drafter
    and verifier limits it."""
    for window, ratio in product((2, 4, 8), (0.05, 0.3, 2.0)):
        assert streamed_tokens_per_s(window, 0.0, ratio, 1.0) == pytest.approx(1.0)
        at_one = streamed_tokens_per_s(window, 1.0, ratio, 1.0)
        assert at_one == pytest.approx(max(1.0, min(window, 1 / ratio)), rel=0.01)
    for tokens in (paper_tokens, windowed_tokens):
        assert tokens(5, 1.0) == pytest.approx(5.0)
    assert paper_tokens(5, 0.0) == 0.5
    assert windowed_tokens(5, 0.0) == 1.0


@settings(deadline=None)
@given(windows, acceptances, st.floats(0.01, 3), st.floats(0.01, 3))
def test_decoupled_yields_no_more_per_step_than_a_free_drafter_in_turn(window, p, draft_s, step_s):
    most = expected_tokens(window, p) / step_s
    for expect in EXPECTATIONS:
        assert 0 < expect(window, p, draft_s, step_s) <= most * (1 + 1e-9)


@pytest.mark.parametrize(("window", "acceptance"), [(0, 0.5), (2, 1.1), (2, float("nan"))])
def test_invalid_windows_and_probabilities_are_refused(window, acceptance):
    for expect in EXPECTATIONS:
        with pytest.raises(ValueError, match="acceptance"):
            expect(window, acceptance, 1.0, 1.0)
