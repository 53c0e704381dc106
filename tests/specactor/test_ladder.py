"""The draft ladder chooses the fastest drafter, by acceptances that are measured from rates."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.specactor.ladder import (
    Ladder,
    acceptance_rate,
    choose_drafter,
    request_acceptance,
    token_acceptance,
)
from refrain.schemas.rollout import DraftProgress
from tests.specactor.latencies import AffineLatency
from tests.specactor.views import NGRAM, SMALL, drafted

MACHINE = AffineLatency()
AHEAD = {"small": 1, "large": 2}
LADDER = Ladder(MACHINE, 4, ("ngram", "small", "large"), 1000.0, 8, AHEAD)
COSTLY = Ladder(AffineLatency(5e-3, 3e-4, 3e-4), 4, LADDER.drafters, 1000.0, 8, AHEAD)

rates = st.dictionaries(st.sampled_from(LADDER.drafters), st.floats(0, 1))


@settings(deadline=None)
@given(st.integers(1, 32), st.floats(0.05, 1))
def test_a_rate_is_turned_back_into_the_probability_it_came_from(window, p):
    assert token_acceptance(window, acceptance_rate(window, p)) == pytest.approx(p, abs=1e-9)


def test_the_rate_is_what_counting_gives():
    random = np.random.default_rng(0)
    right = random.random((20000, 5)) < 0.7
    measured = right.cumprod(axis=1).sum() / right.size
    assert acceptance_rate(5, 0.7) == pytest.approx(measured, abs=0.01)
    assert token_acceptance(5, measured) == pytest.approx(0.7, abs=0.01)
    assert measured < 0.5, "the rate must be far below the probability"


@pytest.mark.parametrize(("window", "rate"), [(0, 0.5), (3, 1.2), (3, float("nan"))])
def test_no_rate_is_refused(window, rate):
    with pytest.raises(ValueError, match="acceptance rate"):
        token_acceptance(window, rate)


def test_a_request_s_acceptance():
    assert request_acceptance(None) is None
    assert request_acceptance(drafted(None)) is None
    assert request_acceptance(drafted(0.5, None)) is None
    assert request_acceptance(drafted(0.5)) == request_acceptance(drafted(0.5, NGRAM)) == 0.5
    assert request_acceptance(DraftProgress(SMALL, 12, 2, 1)) == 0.67, "must round to hundredths"


@settings(deadline=None)
@given(rates, st.integers(1, 600), st.sampled_from([LADDER, COSTLY]))
def test_the_largest_speed_up_is_chosen(acceptances, batch, ladder):
    best = {drafter: ladder.best(drafter, p, batch) for drafter, p in acceptances.items()}
    chosen = choose_drafter(ladder, acceptances, batch)
    most = max((choice.speedup for choice in best.values()), default=1.0)
    if chosen is None:
        assert most <= 1.0
    else:
        assert best[chosen.drafter] == (chosen.window, most)
        assert chosen.coupled == (chosen.drafter == "ngram")
        assert most > 1.0


def test_the_choice_changes_with_acceptance_and_batch():
    """The best drafter depends on both, as in the paper's figure 10."""
    alike = {"ngram": 0.5, "small": 0.5, "large": 0.5}
    assert choose_drafter(LADDER, alike, 1).drafter == "ngram"
    better = {"ngram": 0.1, "small": 0.7, "large": 0.72}
    assert choose_drafter(LADDER, better, 1).drafter == "small"
    assert choose_drafter(COSTLY, alike, 512) is None
    assert choose_drafter(LADDER, {"unknown": 1.0}, 1) is None


def test_a_drafter_that_serves_more_engines_is_slower():
    alone, shared = (replace(LADDER, ahead={"small": num}) for num in (1, 40))
    assert alone.best("small", 0.8, 64).speedup > 1.05 * shared.best("small", 0.8, 64).speedup
    setting = shared.setting("small", 3)
    in_steps = replace(shared, max_drafted=128)
    assert in_steps.pace(setting, 0.8, 64).tokens < shared.pace(setting, 0.8, 64).tokens
    assert in_steps.pace(setting, 0.8, 3) == shared.pace(setting, 0.8, 3)


def test_the_ladder_as_a_grid():
    surfaces = LADDER.surfaces((1, 64), (0.2, 0.5, 0.8))
    assert list(surfaces) == ["ngram", "small", "large"]
    assert surfaces["small"].speedups[1, 2] == LADDER.best("small", 0.8, 64).speedup
