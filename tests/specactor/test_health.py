"""A drafter that no longer follows the policy leaves the ladder. It returns when it recovers."""

import pytest

from refrain.engines.specactor.health import MIN_DRAFT_TOKENS, NUM_RECENT, DrafterHealth
from refrain.engines.specactor.ladder import Ladder, choose_drafter
from tests.specactor.latencies import AffineLatency

LADDER = Ladder(AffineLatency(10e-3, 1e-4, 5e-5), 4, ("small",), 1000.0, 8, {"small": 1})
BATCH = 64


def health_of(*probabilities: float, first: int = 0) -> DrafterHealth:
    """Return health with one acceptance for each policy version, from version `first` on."""
    health = DrafterHealth()
    for version, p in enumerate(probabilities, first):
        add(health, version, p)
    return health


def add(health, version, p, num=100_000):
    num_accepted = round(num * p)
    health.add(version, "small", num_accepted, num - num_accepted)


def test_the_ladder_of_this_test_pays_in_between():
    assert LADDER.best("small", 0.8, BATCH).window
    assert not LADDER.best("small", 0.2, BATCH).window


def test_acceptance_by_policy_version_adds_up_over_steps():
    health = health_of(0.8)
    add(health, 1, 0.6)
    add(health, 1, 0.7, num=300_000)
    history = health.history("small")
    assert history == {0: pytest.approx(0.8, abs=1e-3), 1: pytest.approx(0.675, abs=1e-3)}
    health.add(1, "small", 0, 0)
    assert health.history("small") == history


def test_a_collapse_takes_it_off_the_ladder_at_once():
    health = health_of(0.8, 0.82)
    assert not health.collapsed("small", LADDER, BATCH)
    assert choose_drafter(LADDER, health.acceptances(LADDER, BATCH), BATCH)
    add(health, 2, 0.2)
    assert health.collapsed("small", LADDER, BATCH)
    assert health.acceptances(LADDER, BATCH) == {}
    mean = sum(health.history("small").values()) / 3
    assert choose_drafter(LADDER, {"small": mean}, BATCH), "the mean alone must keep the drafter"


def test_halved_acceptance_that_pays_is_no_collapse():
    free = Ladder(AffineLatency(10e-3, 0.0, 0.0), 4, ("small",), 1000.0, 8, {"small": 1})
    health = health_of(0.9, 0.3)
    assert free.best("small", 0.3, 1).window
    assert not health.collapsed("small", free, 1)


def test_drafter_that_never_paid_has_not_collapsed():
    assert not health_of(0.2, 0.15).collapsed("small", LADDER, BATCH)


def test_few_tokens_do_not_collapse_a_drafter():
    health = health_of(0.8)
    health.add(1, "small", 0, MIN_DRAFT_TOKENS - 1)
    assert not health.collapsed("small", LADDER, BATCH)
    health.add(1, "small", 0, 1)
    assert health.collapsed("small", LADDER, BATCH)


def test_collapsed_drafter_is_tried_and_returns():
    health = health_of(0.8, 0.2)
    trials = {step: health.trials(step, LADDER, BATCH, 1000) for step in range(2, 7)}
    assert trials == {2: {}, 3: {}, 4: {"small": 20}, 5: {}, 6: {}}
    assert health.trials(4, LADDER, BATCH, 3) == {"small": 1}
    add(health, 4, 0.75, num=1000)
    assert not health.collapsed("small", LADDER, BATCH)
    assert "small" in health.acceptances(LADDER, BATCH)
    assert health.trials(8, LADDER, BATCH, 1000) == {}


def test_a_drafter_that_was_never_measured_is_tried():
    assert DrafterHealth().trials(0, LADDER, BATCH, 1000) == {"small": 20}


def test_a_drafter_that_stays_poor_is_poor_rather_than_collapsed():
    health = health_of(0.8, *[0.2] * (NUM_RECENT - 1))
    assert health.collapsed("small", LADDER, BATCH)
    add(health, NUM_RECENT, 0.2)
    assert not health.collapsed("small", LADDER, BATCH)
    assert choose_drafter(LADDER, health.acceptances(LADDER, BATCH), BATCH) is None
    assert health.trials(4, LADDER, BATCH, 100) == {"small": 2}
