"""Acceptance predicts the probability of draft tokens, and learns it only from verified tokens."""

import json

import numpy as np
import pytest

from refrain.engines.histospec.acceptance import FORGET, NUM_CLASSES, PRIOR_WEIGHT, Acceptance
from refrain.engines.histospec.drafting import NUM_EVIDENCE, evidence_factors, evidence_shares

ROW = np.array([[3, 7, 3, 0]], np.uint16)


def observe(acceptance, num_drafted, num_accepted, times=1):
    for _ in range(times):
        acceptance.observe(ROW, np.array([num_drafted]), np.array([num_accepted]))


def test_probabilities_are_of_a_token_and_all_before_it():
    acceptance = Acceptance()
    shares = acceptance.by_class
    got = acceptance.of_drafts(ROW, np.array([3]))
    assert got[0].tolist() == pytest.approx(
        [shares[3], shares[3] * shares[7], shares[3] * shares[7] * shares[3], 0.0]
    )


def test_first_guesses_are_shares_with_one_case_more():
    shares = evidence_shares()
    assert shares.min() > 0.0
    assert shares.max() < 1.0
    # Seen once and accepted once. Seen 32 times and always accepted.
    counted = shares[: 6 * 7 * 12].reshape(6, 7, 12)
    assert counted[0, 6] == pytest.approx(0.5)
    assert counted[5, 6] == pytest.approx(32 / 33)


def test_the_first_wrong_token_counts_and_those_after_it_do_not():
    acceptance = Acceptance()
    before, by_class = acceptance.shares, acceptance.by_class
    # Of 3, 7, 3 the first 3 was accepted and 7 rejected. The second 3 was not tested.
    observe(acceptance, 3, 1)
    after = acceptance.shares
    assert after[3] == pytest.approx((before[3] * PRIOR_WEIGHT + 1) / (PRIOR_WEIGHT + 1))
    assert after[7] == pytest.approx(before[7] * PRIOR_WEIGHT / (PRIOR_WEIGHT + 1))
    others = np.delete(np.arange(NUM_CLASSES), [3, 7])
    assert (acceptance.by_class[others] == by_class[others]).all(), "two tokens moved other classes"


def test_classes_that_were_never_tried_go_with_those_that_were():
    """When the drafts of some classes are mostly rejected, untried classes of the same source are
    expected to be rejected too."""
    acceptance, rng = Acceptance(), np.random.default_rng(0)
    first = acceptance.by_class[NUM_EVIDENCE // 2 : NUM_EVIDENCE]
    tried = rng.integers(NUM_EVIDENCE // 2, NUM_EVIDENCE, (100, 1)).astype(np.uint16)
    acceptance.observe(tried, np.ones(100, np.int32), (rng.random(100) < 0.1).astype(np.int32))
    others = np.setdiff1d(np.arange(NUM_EVIDENCE // 2, NUM_EVIDENCE), tried)
    assert first.mean() > 0.6
    assert acceptance.by_class[others].mean() < 0.35
    shared = acceptance.by_class[NUM_EVIDENCE : 2 * NUM_EVIDENCE]
    assert (shared == Acceptance().by_class[NUM_EVIDENCE : 2 * NUM_EVIDENCE]).all(), (
        "classes of another source changed"
    )


def test_acceptance_learns_the_deciding_factor():
    """Drafts after a long match are accepted, those after a short match rejected. Untried classes
    with the same factors are predicted alike."""
    factors = evidence_factors()[1]
    long = factors[:, -4] == 1.0
    classes = np.flatnonzero(factors[:, 0]) + NUM_EVIDENCE - len(factors)
    acceptance, rng = Acceptance(), np.random.default_rng(0)
    tried = rng.choice(len(classes), 150, replace=False)
    rows = classes[tried][:, None].astype(np.uint16)
    acceptance.observe(rows, np.ones(150, np.int32), long[tried].astype(np.int32))
    untried = np.setdiff1d(np.arange(len(classes)), tried)
    assert acceptance.shares[classes[untried[long[untried]]]].mean() > 0.8
    assert acceptance.shares[classes[untried[~long[untried]]]].mean() < 0.2


def test_acceptance_state_is_restored():
    one, other = Acceptance(), Acceptance()
    observe(one, 3, 1, 50)
    other.restore(json.loads(json.dumps(one.state())))
    assert other.state() == one.state()
    assert other.by_class[[3, 7]] == pytest.approx(one.by_class[[3, 7]], abs=0.02)
    assert other.num_observed == pytest.approx(100 * (1 - FORGET**50) / (50 * (1 - FORGET)))
    with pytest.raises(ValueError, match="another version"):
        other.restore({"num_right": [1.0], "num_tried": [1.0]})


def test_rarely_tried_classes_get_higher_estimates():
    """Of two classes with the same share, the one with fewer trials gets the higher estimate."""
    acceptance = Acceptance()
    for _ in range(500):
        observe(acceptance, 2, 1)  # 3 is accepted, 7 rejected.
    often = acceptance.by_class[7]
    state = acceptance.state()
    for name in ("num_right", "num_tried"):
        state[name][9] = state[name][7] / 60
    acceptance.restore(state)
    assert acceptance.by_class[9] > 3 * often
    assert acceptance.by_class.max() <= 1.0


def test_acceptance_follows_a_changing_policy():
    acceptance = Acceptance()
    observe(acceptance, 1, 1, 2000)
    assert acceptance.by_class[3] > 0.99
    observe(acceptance, 1, 0, 2000)
    assert acceptance.by_class[3] < 0.01
