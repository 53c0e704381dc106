"""What a campaign draws."""

from collections import Counter

import pytest

from benchmarks.chaos.faults import TARGETS, Fault, Moment, RunMode, Target, draw, modes, moments


@pytest.mark.parametrize("seed", range(20))
def test_sixty_faults_have_each_target_and_kind_three_times(seed: int) -> None:
    drawn = draw(60, seed)
    for kinds, column in ((Target, "target"), (Fault, "fault"), (Moment, "moment")):
        counts = Counter(getattr(strike, column) for strike in drawn)
        assert min(counts[kind] for kind in kinds) >= 3, (column, counts)
    assert min(Counter(strike.mode for strike in drawn)[mode] for mode in RunMode) >= 20
    pairs = {(strike.target, strike.fault) for strike in drawn}
    assert len(pairs) >= 28, "a target meets the same again and again"


def test_only_what_can_happen_is_drawn() -> None:
    for strike in draw(500, 3):
        assert strike.target in TARGETS[strike.fault]
        assert strike.moment in moments(strike.target, strike.fault)
        assert strike.mode in modes(strike.moment)


def test_the_seed_decides_and_a_longer_campaign_goes_on() -> None:
    assert draw(60, 1)[:20] == draw(20, 1)
    assert draw(20, 1) != draw(20, 2)
    assert [strike.number for strike in draw(5, 0)] == [0, 1, 2, 3, 4]
