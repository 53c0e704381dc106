"""Expected tokens of drafting ahead, with constant times of a drafted token and of a step."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.latency.expectation import expected_tokens, streamed_step
from tests.specactor.machine import Machine

windows, acceptances = st.integers(1, 16), st.floats(0, 1)


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


def test_extremes():
    """With no token right, speed is that of plain decoding. With all right, the slower of drafter
    and verifier limits it."""
    for window, ratio, alone in product((2, 4, 8), (0.05, 0.3, 2.0), (False, True)):
        step = streamed_step(window, 0.0, 1.0 / ratio, alone)
        assert (step.tokens, step.verifying) == (pytest.approx(1.0), pytest.approx(step.rejecting))
        at_one = streamed_step(window, 1.0, 1.0 / ratio, alone).tokens
        assert at_one == pytest.approx(max(1.0, min(window, 1 / ratio)), rel=0.01)


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
