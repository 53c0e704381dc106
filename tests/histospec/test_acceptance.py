"""What a draft token is worth: learnt from what was verified, and only from that."""

import json

import numpy as np
import pytest

from engines.histospec.acceptance import FORGET, NUM_CLASSES, PRIOR_WEIGHT, Acceptance
from engines.histospec.drafting import evidence_shares

ROW = np.array([[3, 7, 3, 0]], np.uint16)


def observe(acceptance, num_drafted, num_accepted, times=1):
    for _ in range(times):
        acceptance.observe(ROW, np.array([num_drafted]), np.array([num_accepted]))


def shares_of(acceptance):
    """What was right of what was tried, by class."""
    state = acceptance.state()
    return np.array(state["right"]) / np.array(state["tried"])


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
    # Seen once and followed; seen 32 times and always followed.
    counted = shares[: 6 * 7 * 12].reshape(6, 7, 12)
    assert counted[0, 6] == pytest.approx(0.5)
    assert counted[5, 6] == pytest.approx(32 / 33)


def test_the_first_wrong_token_counts_and_those_after_it_do_not():
    acceptance = Acceptance()
    before, by_class = shares_of(acceptance), acceptance.by_class
    # Of 3, 7, 3: the first 3 was right and 7 wrong; the second 3 was never put to the test.
    observe(acceptance, 3, 1)
    weight = PRIOR_WEIGHT * FORGET
    after = shares_of(acceptance)
    assert after[3] == pytest.approx((before[3] * weight + 1) / (weight + 1))
    assert after[7] == pytest.approx(before[7] * weight / (weight + 1))
    others = np.delete(np.arange(NUM_CLASSES), [3, 7])
    assert (acceptance.by_class[others] == by_class[others]).all()


def test_what_was_learnt_is_carried_on():
    one, other = Acceptance(), Acceptance()
    observe(one, 3, 1, 50)
    other.restore(json.loads(json.dumps(one.state())))
    assert (other.by_class == one.by_class).all()
    with pytest.raises(ValueError, match="another version"):
        other.restore({"right": [1.0], "tried": [1.0]})


def test_what_was_seldom_tried_is_not_given_up():
    """Of two classes with the same share the one that was tried less is taken to be worth more."""
    acceptance = Acceptance()
    for _ in range(500):
        observe(acceptance, 2, 1)  # 3 is right, 7 wrong.
    often = acceptance.by_class[7]
    state = acceptance.state()
    state["right"][9], state["tried"][9] = state["right"][7] / 60, state["tried"][7] / 60
    acceptance.restore(state)
    assert shares_of(acceptance)[9] == pytest.approx(shares_of(acceptance)[7])
    assert acceptance.by_class[9] > 3 * often
    assert acceptance.by_class.max() <= 1.0


def test_it_follows_a_policy_that_moves():
    acceptance = Acceptance()
    observe(acceptance, 1, 1, 2000)
    assert acceptance.by_class[3] > 0.99
    observe(acceptance, 1, 0, 2000)
    assert acceptance.by_class[3] < 0.01
