"""A jump takes as long as the single steps that it replaces."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from refrain.engines.simulate.pace import Interval, SteadyBatch, plan_stretches


def one_by_one(decode_s, batch, context, steps):
    return sum(decode_s(context + i * batch) for i in range(steps))


def total(stretches):
    return sum(stretch.seconds(stretch.steps) for stretch in stretches)


@given(st.integers(1, 300), st.integers(1, 10**6), st.integers(1, 3000), st.floats(0, 1e-5))
def test_a_straight_line_is_exact_and_takes_one_stretch(batch, context, steps, slope):
    def decode_s(tokens):
        return 0.01 + slope * tokens

    stretches = plan_stretches(decode_s, batch, context, steps)
    assert len(stretches) == 1
    assert total(stretches) == pytest.approx(one_by_one(decode_s, batch, context, steps))


@given(st.floats(1.0, 300.0), st.integers(2, 3000))
def test_a_growth_need_not_be_whole(growth, steps):
    def step_s(tokens):
        return 0.01 + 1e-6 * tokens

    stretches = plan_stretches(step_s, growth, 100.5, steps)
    assert total(stretches) == pytest.approx(one_by_one(step_s, growth, 100.5, steps))


@given(st.integers(1, 64), st.integers(1, 20000), st.integers(2, 3000))
def test_a_bent_line_is_close_and_takes_few(batch, context, steps):
    def decode_s(tokens):
        return 0.01 + 1e-7 * tokens + 1e-6 * max(0.0, tokens - 30000)

    stretches = plan_stretches(decode_s, batch, context, steps)
    assert sum(stretch.steps for stretch in stretches) == steps
    exact = one_by_one(decode_s, batch, context, steps)
    assert total(stretches) == pytest.approx(exact, rel=2e-3)
    assert len(stretches) <= 25


@given(st.integers(1, 64), st.integers(1, 500), st.floats(0, 1e-5), st.floats(0, 1.2))
@example(batch=1, steps=285, slope=1e-12, share=0.0)
def test_steps_at_inverts_seconds(batch, steps, slope, share):
    stretches = plan_stretches(lambda tokens: 0.01 + slope * tokens, batch, 100, steps)
    seconds = total(stretches)
    span = SteadyBatch(Interval(5.0, 5.0 + seconds, batch, 0, False), stretches)
    done = span.steps_at(5.0 + share * seconds)
    assert span.seconds(done) <= share * seconds + 1e-6
    assert done == steps or span.seconds(done + 1) > share * seconds - 1e-6
    assert all(span.steps_at(5.0 + span.seconds(n)) == n for n in range(0, steps + 1, 7))
