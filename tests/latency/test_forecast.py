"""Forecasts agree with sums by hand and with a step-by-step simulation, and call the latency model
rarely."""

import timeit
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.latency.analytic import AnalyticLatency
from refrain.engines.latency.fitted import FittedLatency
from refrain.engines.latency.forecast import MAX_SEGMENTS, Unfinished, fields_of, forecast, step_s
from refrain.engines.latency.hardware import A40
from refrain.engines.latency.model_shape import SHAPES
from tests.latency.machines import AffineMachine, finish_s, measure
from tests.simulate.latencies import LinearLatency

AFFINE = AffineMachine()
FITTED = FittedLatency(measure(AFFINE, noise=0.05))
ANALYTIC = AnalyticLatency(SHAPES["LLaMA3.1-8B"], A40)
requests_of = st.builds(
    Unfinished,
    st.integers(1, 4000),
    st.integers(1, 500),
    st.sampled_from([1.0, 1.5, 2.0, 4.0]),
    st.integers(0, 8),
)
some_requests = st.lists(requests_of, min_size=1, max_size=80)
machines = st.sampled_from([AFFINE, FITTED, ANALYTIC])


def decode(latency, tp_degree, requests, max_num_seqs):
    """Return the seconds of all steps, each at the middle of its context. A last step counts for
    the part of it that is left."""
    waiting = sorted(requests, key=lambda r: r.remaining_tokens / r.tokens_per_pass)
    running, seconds = [], 0.0
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            running.append([waiting.pop(), 0.0])
        left = [r.remaining_tokens / r.tokens_per_pass - done for r, done in running]
        width = min(1.0, *left)
        context = sum(r.context_tokens + r.tokens_per_pass * (d + width / 2) for r, d in running)
        window = float(np.mean([r.window for r, _ in running]))
        seconds += width * step_s(latency, tp_degree, len(running), context, window)
        running = [
            [r, done + width]
            for (r, done), steps in zip(running, left, strict=True)
            if steps - width > 1e-9
        ]
    return seconds


def test_by_hand():
    # 10 steps of both, from 2 * 5 to 2 * 15 context tokens, then 20 steps of one, from 15 to 35.
    both_s = 2e-3 + 8e-3 + 2 * 2e-5 + 20 * 3e-8
    one_s = 2e-3 + 8e-3 + 2e-5 + 25 * 3e-8
    requests = [Unfinished(5, 10), Unfinished(5, 30)]
    assert finish_s(AFFINE, 1, requests) == pytest.approx(10 * both_s + 20 * one_s)
    assert finish_s(AFFINE, 1, requests, max_num_seqs=1) == pytest.approx(
        30 * (one_s - 5 * 3e-8) + 10 * (one_s - 15 * 3e-8)
    )
    assert finish_s(AFFINE, 1, []) == 0.0


@given(machines, some_requests, st.integers(1, 40), st.sampled_from([1, 2]))
@settings(deadline=None)
def test_as_a_step_by_step_engine_has_it(latency, requests, max_num_seqs, tp_degree):
    forecast_s = finish_s(latency, tp_degree, requests, max_num_seqs=max_num_seqs)
    assert forecast_s == pytest.approx(decode(latency, tp_degree, requests, max_num_seqs), rel=0.02)


@given(machines, some_requests)
@settings(deadline=None)
def test_more_to_do_takes_longer(latency, requests):
    # With more requests, the forecast merges ends and so rounds the batch.
    requests = requests[:MAX_SEGMENTS]
    longer = [replace(r, remaining_tokens=r.remaining_tokens + 50) for r in requests]
    assert finish_s(latency, 2, longer) > finish_s(latency, 2, requests)
    # The forecast uses a joint window, between the windows of all requests.
    whole = [replace(r, window=0) for r in requests]
    assert finish_s(latency, 2, requests) >= finish_s(latency, 2, whole) * (1 - 1e-6)


def test_remaining_requests_equal_sums_by_hand():
    """A step takes 11 ms, so 0.11 s are 10 steps. Look in the middle of a segment and at an end."""
    latency = LinearLatency(step_s=0.011)
    fast, slow = Unfinished(7, 40, tokens_per_pass=2.0), Unfinished(5, 30)
    both = [fast, slow]
    course = forecast(latency, 1, fields_of(both))
    assert course.after(both, 0.0) == [slow, fast]
    later = [(r.context_tokens, r.remaining_tokens) for r in course.after(both, 0.11)]
    assert later == [pytest.approx((15, 20)), pytest.approx((27, 20))]
    assert [r.context_tokens for r in course.after(both, 0.22)] == [pytest.approx(25)]
    assert course.after(both, 0.33) == []
    talking = [replace(one, context_per_token=3.0) for one in both]
    later = [
        r.context_tokens for r in forecast(latency, 1, fields_of(talking)).after(talking, 0.11)
    ]
    assert later == [pytest.approx(5 + 3 * 10), pytest.approx(7 + 3 * 20)]
    assert course.after(both, 9.0) == []


@given(machines, st.lists(requests_of, min_size=1, max_size=MAX_SEGMENTS), st.floats(0, 0.95))
@settings(deadline=None)
def test_going_on_from_later_ends_at_the_same_time(latency, requests, share):
    course = forecast(latency, 2, fields_of(requests))
    wait_s = share * course.finish_s
    later_s = wait_s + finish_s(latency, 2, course.after(requests, wait_s))
    assert later_s == pytest.approx(course.finish_s, rel=0.01)


def test_requests_gain_at_their_own_pace():
    """The fast request gains 4 tokens a step, so it ends 400 tokens when the slow one ends 100.
    Both are in each verifying step."""
    fast, slow = Unfinished(0, 400, tokens_per_pass=4.0, window=6), Unfinished(0, 100)
    assert finish_s(AFFINE, 1, [fast, slow]) == pytest.approx(
        100 * AFFINE.verify_s(1, 2, 4 * 50 + 50, 3)
    )


def test_half_a_window_costs_half():
    one, two = (step_s(AFFINE, 1, 4, 100.0, window) for window in (1.0, 2.0))
    assert step_s(AFFINE, 1, 4, 100.0, 1.5) == pytest.approx((one + two) / 2)
    assert step_s(AFFINE, 1, 4, 100.0, 0.0) == AFFINE.decode_s(1, 4, 100.0)


@dataclass
class Counting(AffineMachine):
    asked: list = field(default_factory=list)

    def decode_s(self, tp_degree, batch, context_tokens):
        self.asked.append((batch, context_tokens))
        return super().decode_s(tp_degree, batch, context_tokens)


def many(num_requests, seed=0):
    random = np.random.default_rng(seed)
    lengths = random.lognormal(8.0, 0.9, num_requests)
    return [Unfinished(500.0, float(length)) for length in lengths]


def test_few_questions():
    latency = Counting()
    forecast_s = finish_s(latency, 1, many(256))
    assert len(latency.asked) <= MAX_SEGMENTS
    batches = [batch for batch, _ in latency.asked]
    assert batches == sorted(batches, reverse=True)
    assert batches[-5:] == [5, 4, 3, 2, 1]
    rounded = [replace(r, remaining_tokens=round(r.remaining_tokens)) for r in many(256)]
    assert forecast_s == pytest.approx(decode(AFFINE, 1, rounded, 256), rel=0.005)


def test_forecast_is_fast():
    requests = many(256)
    assert min(timeit.repeat(lambda: finish_s(FITTED, 1, requests), number=5, repeat=5)) / 5 < 4e-3
