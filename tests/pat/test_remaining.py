"""Estimates of remaining tokens follow the formula, are never 0, and never exceed the maximum."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import lognorm

from refrain.engines.pat.remaining import FromHistory, Maximum
from refrain.schemas.rollout import LengthHistory, RequestId, Split
from tests.pat.stage import request

MOST = 8000
XI = 1.4342
"""Expected maximum of 8 standard normals, by Blom."""
histories = st.builds(
    lambda median, factor, previous: LengthHistory(median, int(median * factor), previous),
    st.floats(10, 3000),
    st.floats(1, 5),
    st.none() | st.floats(10, 3000),
)
known = st.dictionaries(st.sampled_from([f"prompt-{i}" for i in range(6)]), histories)
generated_of = st.dictionaries(st.integers(0, 9), st.integers(0, MOST), min_size=1, max_size=10)


class SameForAll(FromHistory):
    """Gives all requests the same quantile."""

    def __init__(self, *args, quantile, **fields):
        super().__init__(*args, **fields)
        self._quantile = quantile

    def _quantiles(self, requests, scenario):
        del scenario
        return np.full(len(requests), self._quantile)


def estimate(history, generated, quantile=None) -> list[float]:
    if quantile is None:
        remaining = FromHistory(history, MOST, group_size=8)
    else:
        remaining = SameForAll(history, MOST, group_size=8, quantile=quantile)
    return list(remaining.tokens({request(i): num for i, num in generated.items()}).values())


def test_the_maximum():
    assert Maximum(100).tokens({request(0): 30, request(1): 100}) == {request(0): 70, request(1): 1}


@given(known, generated_of, st.none() | st.floats(0.01, 0.99))
def test_at_least_a_token_and_no_more_than_the_maximum(history, generated, quantile):
    for tokens, so_far in zip(
        estimate(history, generated, quantile=quantile), generated.values(), strict=True
    ):
        assert 1.0 <= tokens <= max(1.0, MOST - so_far)
        assert math.isfinite(tokens)


@pytest.mark.parametrize("so_far", [1, 400, 1500])
@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
def test_as_scipy_has_the_conditional_quantile(so_far, quantile):
    history = {"prompt-0": LengthHistory(500.0, 2000)}
    length = lognorm(s=math.log(4) / XI, scale=500)
    expected = length.isf((1 - quantile) * length.sf(so_far)) - so_far
    (tokens,) = estimate(history, {0: so_far}, quantile=quantile)
    assert tokens == pytest.approx(expected, rel=1e-3)


def test_the_longest_is_the_expected_longest():
    """The longest of 8 draws matches on average over many groups, in logarithms."""
    (far,) = estimate({"prompt-0": LengthHistory(500.0, 2000)}, {0: 0}, quantile=0.5)
    assert far + 1 == pytest.approx(500, rel=1e-3)
    random = np.random.default_rng(0)
    draws = 500 * np.exp(math.log(4) / XI * random.standard_normal((4000, 8)))
    assert np.log(draws.max(axis=1)).mean() == pytest.approx(math.log(2000), abs=0.02)


@given(histories, st.integers(0, MOST // 2), st.floats(0.05, 0.9))
def test_a_higher_quantile_is_longer(lengths, so_far, quantile):
    low, high = (
        estimate({"prompt-0": lengths}, {0: so_far}, quantile=q)[0]
        for q in (quantile, quantile + 0.05)
    )
    assert high >= low


def test_remaining_beyond_the_longest_is_a_share():
    history = {"prompt-0": LengthHistory(100.0, 110)}
    shares = [estimate(history, {0: num}, quantile=0.5)[0] / num for num in (200, 400, 800, 1600)]
    assert all(share > 0.05 for share in shares)
    assert shares == sorted(shares)


def test_within_the_spread_what_is_left_falls_at_first():
    history = {"prompt-0": LengthHistory(1000.0, 1500)}
    left = [estimate(history, {0: num}, quantile=0.5)[0] for num in (1, 200, 500, 900)]
    assert left == sorted(left, reverse=True)


def test_quantiles_are_spread_over_requests():
    """A single response gets its median. Of many with the same tokens so far, few are long."""
    history = {"prompt-0": LengthHistory(500.0, 2000)}
    ids = [RequestId(Split.TRAIN, 0, "prompt-0", sample) for sample in range(100)]
    remaining = FromHistory(history, MOST, group_size=8)
    (alone,) = remaining.tokens({ids[0]: 100}).values()
    assert [alone] == estimate(history, {0: 100}, quantile=0.5)
    many = np.sort(list(remaining.tokens(dict.fromkeys(ids, 100)).values()))
    exact = [estimate(history, {0: 100}, quantile=(k + 0.5) / 100)[0] for k in range(100)]
    assert np.max(np.abs(np.log(many / exact))) < 0.35
    assert many.mean() == pytest.approx(np.mean(exact), rel=0.05)


def test_by_itself_each_has_its_median():
    """`medians` treats each request alone. `tokens` spreads the quantiles over all of them."""
    history = {"prompt-0": LengthHistory(500.0, 2000), "prompt-1": LengthHistory(900.0, 1000)}
    remaining = FromHistory(history, MOST, group_size=8)
    so_far = {request(i): num for i, num in enumerate([100, 850, 40])}
    alone = [estimate(history, {i: num}, quantile=0.5)[0] for i, num in enumerate([100, 850, 40])]
    assert list(remaining.medians(so_far).values()) == alone
    assert list(remaining.tokens(so_far).values()) != alone
    assert remaining.medians({}) == {}
    assert FromHistory({}, MOST, group_size=8).medians({request(0): 40}) == {request(0): MOST - 40}


def test_lengths_grow_as_they_did():
    def of(previous):
        return {f"prompt-{i}": LengthHistory(300.0, 600, previous) for i in range(3)}

    (still,) = estimate(of(300.0), {0: 0}, quantile=0.5)
    (grown,) = estimate(of(200.0), {0: 0}, quantile=0.5)
    (capped,) = estimate(of(10.0), {0: 0}, quantile=0.5)
    assert (grown + 1) / (still + 1) == pytest.approx(1.5, rel=0.01)
    assert (capped + 1) / (still + 1) == pytest.approx(2.0, rel=0.01)
    assert estimate(of(None), {0: 0}, quantile=0.5) == [still]


def test_prompts_without_history():
    history = {"prompt-0": LengthHistory(100.0, 200), "prompt-1": LengthHistory(10_000.0, 20_000)}
    (typical,) = estimate(history, {7: 0}, quantile=0.5)
    assert typical + 1 == pytest.approx(1000, rel=0.01)
    # It has the spread of all prompts, which is much larger than a single prompt's.
    (low,) = estimate(history, {7: 0}, quantile=0.16)
    (own,) = estimate(history, {0: 0}, quantile=0.16)
    assert low + 1 < 0.11 * (typical + 1)
    assert own > 0.5 * 100
    assert estimate({}, {7: 30}) == [MOST - 30]


def test_no_requests():
    assert FromHistory({"a": LengthHistory(1.0, 1)}, MOST, group_size=1).tokens({}) == {}


def test_steady_estimates_keep_their_order_as_others_end():
    """Equal requests of one prompt keep their estimated order when others end."""
    history = {"p": LengthHistory(1000.0, 4000)}
    ids = [RequestId(Split.TRAIN, 1, "p", index) for index in range(9)]
    steady = FromHistory(history, 16000, group_size=8)
    everybody = steady.tokens(dict.fromkeys(ids, 500))
    ranked = sorted(ids, key=everybody.__getitem__)
    left = [id for id in ids if id not in ranked[2:5]]
    some = steady.tokens(dict.fromkeys(left, 500))
    assert sorted(left, key=some.__getitem__) == [id for id in ranked if id in left]
    alone = steady.tokens({ranked[-1]: 500})[ranked[-1]]
    median = SameForAll(history, 16000, group_size=8, quantile=0.5)
    assert alone == median.tokens({ranked[-1]: 500})[ranked[-1]] < everybody[ranked[-1]]


@given(known, generated_of, st.randoms(use_true_random=False))
def test_estimates_ignore_the_order_of_requests(history, generated, random):
    ids = [request(index) for index in generated]
    shuffled = random.sample(ids, len(ids))
    num_of = dict(zip(ids, generated.values(), strict=True))
    found = [
        FromHistory(history, MOST, group_size=8).tokens({id: num_of[id] for id in order})
        for order in (ids, shuffled)
    ]
    assert found[0] == pytest.approx(found[1])
