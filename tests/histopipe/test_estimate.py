"""Estimates agree with sums by hand and with step-by-step decoding, and fall with more engines."""

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.benchmarks.papers.settings import LinearLatency
from refrain.engines.histopipe.estimate import context_growth, estimate_rollout_s, expected_lengths
from refrain.schemas.rollout import LengthHistory
from tests.simulate.latencies import LinearLatency as DraftingLatency

LATENCY = LinearLatency(step_s=0.01, sequence_s=1e-3, token_s=1e-6)
estimate = partial(estimate_rollout_s, LATENCY, 1)
some_lengths = st.lists(st.integers(1, 400), min_size=1, max_size=90)


def decode(latency, lengths, max_num_seqs, prompt_tokens):
    """Return the seconds of all steps, each at the middle of its context."""
    waiting = sorted(lengths)
    running, seconds = [], 0.0
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            running.append([waiting.pop(), 0])
        context = sum(prompt_tokens + done + 0.5 for _, done in running)
        seconds += latency.decode_s(1, len(running), context)
        running = [[length, done + 1] for length, done in running if done + 1 < length]
    return seconds


def test_by_hand():
    # 10 steps of both, from 2 * 5 to 2 * 15 context tokens, then 20 steps of one, from 15 to 35.
    expected = 10 * (0.01 + 2e-3 + 20e-6) + 20 * (0.01 + 1e-3 + 25e-6)
    assert estimate(np.array([10, 30]), 1, prompt_tokens=5) == pytest.approx(expected)
    assert estimate(np.array([10, 30]), 2, prompt_tokens=5) == pytest.approx(30 * (0.011 + 20e-6))


def test_observed_tokens_make_the_context_longer():
    """30 steps from 5 to 5 + 3 * 30 context tokens, by history. The other prompt is typical."""
    history = {"a": LengthHistory(30, 30, observed_per_token=2.0)}
    growth = context_growth(["a", "new"], history)
    lengths, expected = np.array([[30], [30]]), 30 * (0.011 + 50e-6)
    given = {"prompt_tokens": 5, "context_per_token": growth}
    assert estimate(lengths, 2, **given) == pytest.approx(expected)
    assert estimate(lengths, 2, **given, max_context_tokens=25) == pytest.approx(2 * expected)


@given(some_lengths, st.integers(1, 40), st.integers(0, 100))
@settings(deadline=None)
def test_as_a_step_by_step_decoder_has_it(lengths, max_num_seqs, prompt_tokens):
    seconds = estimate(np.array(lengths), 1, max_num_seqs=max_num_seqs, prompt_tokens=prompt_tokens)
    assert seconds == pytest.approx(decode(LATENCY, lengths, max_num_seqs, prompt_tokens), rel=0.01)


@given(some_lengths, st.integers(1, 40))
@settings(deadline=None)
def test_estimate_falls_with_more_engines(lengths, max_num_seqs):
    times = [estimate(np.array(lengths), n, max_num_seqs=max_num_seqs) for n in range(1, 30)]
    # With many requests, the estimate merges ends and so rounds the batch.
    slack = 1.01 if len(lengths) > 64 else 1 + 1e-9
    assert all(b <= a * slack for a, b in itertools.pairwise(times))


def test_responses_beyond_the_cache_wait():
    # Eight requests of 100 tokens have a mean context of 50.
    lengths, held = np.full(8, 100), 8 * 50
    free_s = estimate(lengths, 1, prompt_tokens=0)
    assert estimate(lengths, 1, prompt_tokens=0, max_context_tokens=held) == free_s
    tight_s = estimate(lengths, 1, prompt_tokens=0, max_context_tokens=held / 2)
    assert tight_s == pytest.approx(2 * free_s)


def test_samples_of_a_prompt_stay_together():
    two = np.array([[100, 100], [1, 1]])
    assert estimate(two, 2) == estimate(np.array([100, 100]), 1)
    assert estimate(two, 9) == estimate(two, 2)
    assert estimate(two.ravel(), 4) < estimate(two, 4)


def test_tokens_per_pass_may_differ_between_responses():
    latency, lengths = DraftingLatency(step_s=0.02), np.array([[300, 300], [100, 100], [80, 80]])
    same = np.full(lengths.shape, 2.0)
    assert estimate_rollout_s(
        latency, 1, lengths, 2, tokens_per_pass=same, window=5
    ) == pytest.approx(estimate_rollout_s(latency, 1, lengths, 2, tokens_per_pass=2.0, window=5))
    # The longest takes 60 passes, the shortest 80. With an engine each, the shortest decides.
    rates = np.array([[5.0, 5.0], [2.0, 2.0], [1.0, 1.0]])
    seconds = estimate_rollout_s(latency, 1, lengths, 3, tokens_per_pass=rates, window=5)
    assert seconds == pytest.approx(80 * 0.02 * 1.05)


def test_expected_lengths_keep_the_median_and_the_longest():
    history = {"a": LengthHistory(100, 400), "b": LengthHistory(10, 10)}
    lengths = expected_lengths(["a", "new", "b"], history, 5)
    assert lengths[0] == pytest.approx([25, 50, 100, 200, 400])
    assert lengths[1] == pytest.approx([55.0] * 5)
    assert lengths[2] == pytest.approx([10.0] * 5)
    assert expected_lengths(["a"], history, 1) == pytest.approx(100)


def test_latencies_asked_for_are_bounded():
    asked = []

    class Counting(LinearLatency):
        def decode_s(self, tp_degree, batch, context_tokens):
            asked.append(batch)
            return super().decode_s(tp_degree, batch, context_tokens)

    lengths = np.arange(1, 3001)
    seconds = estimate_rollout_s(Counting(0.01, 1e-3, 1e-6), 1, lengths, 1, prompt_tokens=9)
    assert len(asked) <= 64
    assert seconds == pytest.approx(decode(LATENCY, lengths.tolist(), 256, 9), rel=0.01)
