"""Expected tokens of drafting ahead, with constant times of a drafted token and of a step."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.latency.expectation import expected_tokens, streamed_step
from tests.specactor.expectations import (
    paper_tokens,
    paper_tokens_per_s,
    streamed_tokens_per_s,
)
from tests.specactor.machine import Machine

windows, acceptances = st.integers(1, 16), st.floats(0, 1)


def test_planning_uses_a_better_estimate_than_the_paper():
    """The paper's leaves out the model's own token, and counts half of a partial window."""
    errors = []
    for window, p, ratio in product((2, 4, 8), (0.5, 0.9), (0.13, 0.31, 0.78)):
        machine = Machine(window, p, lambda _: ratio, lambda _: 1.0, batch=8).run(150)  # noqa: B023
        point, truth = (window, p, ratio, 1.0), machine.tokens_per_s
        estimates = streamed_tokens_per_s(*point), paper_tokens_per_s(*point)
        errors.append([abs(estimate / truth - 1) for estimate in estimates])
    streamed, paper = np.mean(errors, axis=0)
    assert streamed < 0.02
    assert paper > 0.2


def test_a_request_that_has_its_drafter_alone_waits_less():
    """Two drafts take 2 of 2.2 drafted tokens, so the drafter is often at rest at a mismatch."""
    alone = Machine(2, 0.75, lambda _: 1.0, lambda _: 2.2).run(3000).tokens_per_step
    among = Machine(2, 0.75, lambda _: 1.0, lambda _: 2.2, batch=8).run(400).tokens_per_step
    assert streamed_step(2, 0.75, 2.2, alone=True).tokens == pytest.approx(alone, rel=0.03)
    assert streamed_step(2, 0.75, 2.2).tokens == pytest.approx(among, rel=0.03)
    assert alone > 1.04 * among


@pytest.mark.parametrize("window", [1, 2, 5])
def test_at_most_two_windows_less_one_are_wasted(window):
    counts = Machine(window, 0.6, lambda _: 0.01, lambda _: 1.0).run(300).counts
    assert counts.max_wasted == 2 * window - 1


@settings(deadline=None)
@given(windows, acceptances)
def test_the_paper_s_sum(window, p):
    partial = sum(p**a * (1 - p) * (a + 1) / 2 for a in range(window))
    assert paper_tokens(window, p) == pytest.approx(partial + window * p**window)


def test_extremes():
    """With no token right, speed is that of plain decoding. With all right, the slower of drafter
    and verifier limits it."""
    for window, ratio, alone in product((2, 4, 8), (0.05, 0.3, 2.0), (False, True)):
        step = streamed_step(window, 0.0, 1.0 / ratio, alone)
        assert (step.tokens, step.verifying) == (pytest.approx(1.0), pytest.approx(step.rejecting))
        at_one = streamed_step(window, 1.0, 1.0 / ratio, alone).tokens
        assert at_one == pytest.approx(max(1.0, min(window, 1 / ratio)), rel=0.01)
    assert (paper_tokens(5, 1.0), paper_tokens(5, 0.0)) == (pytest.approx(5.0), 0.5)


def test_a_window_of_one_brings_nothing():
    """The verifier decodes the next token while the drafter drafts it."""
    assert streamed_step(1, 0.9, 8.0).tokens == streamed_step(1, 0.9, 0.5).tokens == 1.0


@settings(deadline=None, max_examples=50)
@given(windows, acceptances, st.floats(0.01, 3), st.floats(0.01, 3), st.booleans())
def test_ahead_yields_no_more_per_step_than_a_free_drafter_in_turn(
    window, p, draft_s, step_s, alone
):
    tokens = streamed_step(window, p, step_s / draft_s, alone).tokens
    assert 1 - 1e-9 <= tokens <= expected_tokens(window, p) * (1 + 1e-9)


@pytest.mark.parametrize(("window", "acceptance"), [(0, 0.5), (2, 1.1), (2, float("nan"))])
def test_invalid_windows_and_probabilities_are_refused(window, acceptance):
    with pytest.raises(ValueError, match="acceptance"):
        streamed_step(window, acceptance, 1.0)
