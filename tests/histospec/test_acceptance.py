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
    assert pytest.approx(shares.reshape(-1, 7, 2)[0, 6, 0]) == 0.5
    assert shares.reshape(-1, 7, 2)[5, 6, 0] == pytest.approx(32 / 33)


def test_the_first_wrong_token_counts_and_those_after_it_do_not():
    acceptance = Acceptance()
    before = acceptance.by_class
    # Of 3, 7, 3: the first 3 was right and 7 wrong; the second 3 was never put to the test.
    observe(acceptance, 3, 1)
    weight = PRIOR_WEIGHT * FORGET
    after = acceptance.by_class
    assert after[3] == pytest.approx((before[3] * weight + 1) / (weight + 1))
    assert after[7] == pytest.approx(before[7] * weight / (weight + 1))
    others = np.delete(np.arange(NUM_CLASSES), [3, 7])
    assert (after[others] == before[others]).all()


def test_what_was_learnt_is_carried_on():
    one, other = Acceptance(), Acceptance()
    observe(one, 3, 1, 50)
    other.restore(json.loads(json.dumps(one.state())))
    assert (other.by_class == one.by_class).all()
    with pytest.raises(ValueError, match="another version"):
        other.restore({"right": [1.0], "tried": [1.0]})


def test_it_follows_a_policy_that_moves():
    acceptance = Acceptance()
    observe(acceptance, 1, 1, 2000)
    assert acceptance.by_class[3] > 0.99
    observe(acceptance, 1, 0, 2000)
    assert acceptance.by_class[3] < 0.01
