"""The faults that a campaign draws, and how it deals them to runs."""

from argparse import ArgumentParser
from collections import Counter

import pytest

from refrain.benchmarks.chaos import add_arguments
from refrain.benchmarks.chaos.faults import (
    EVERY_RUNS,
    LATER,
    MAX_STEPS,
    PAIRS,
    TARGETS,
    Fault,
    Moment,
    RunMode,
    Target,
    draw,
    first_step,
    modes,
    moments,
    on_runs,
)
from refrain.benchmarks.chaos.small_run import CHECKOUT
from refrain.schemas.bench import BenchReport


@pytest.mark.parametrize("seed", range(20))
def test_sixty_faults_have_each_target_and_kind_three_times(seed: int) -> None:
    drawn = draw(60, seed)
    at_once = [fault for fault in Fault if fault not in LATER]
    for kinds, column in ((EVERY_RUNS, "target"), (at_once, "fault"), (Moment, "moment")):
        counts = Counter(getattr(strike, column) for strike in drawn)
        assert min(counts[kind] for kind in kinds) >= 3, (column, counts)
    modes_drawn = Counter(strike.mode for strike in drawn)
    assert min(modes_drawn[mode] for mode in (RunMode.SYNC, RunMode.PIPELINED)) >= 20
    assert not modes_drawn[RunMode.STALE]
    pairs = {(strike.target, strike.fault) for strike in drawn}
    assert len(pairs) >= 28, "too few different pairs of target and fault"


@pytest.mark.parametrize("seed", range(20))
def test_a_campaign_of_the_default_size_has_every_pair(seed: int) -> None:
    parser = ArgumentParser()
    add_arguments(parser)
    drawn = draw(parser.parse_args([]).faults, seed)
    assert {(strike.target, strike.fault) for strike in drawn} == set(PAIRS)
    assert {Fault.HANGUP, Fault.LINE, Fault.MEMORY} <= {fault for _, fault in PAIRS}


def test_the_committed_campaign_has_every_pair_and_no_failure() -> None:
    file = CHECKOUT / "benchmarks" / "baselines" / "chaos.json"
    report = BenchReport.model_validate_json(file.read_bytes())
    assert report.figures["pairs_drawn"] == report.figures["pairs_defined"] == len(PAIRS)
    assert {(row["target"], row["fault"]) for row in report.rows} == set(PAIRS)
    assert report.figures["failures"] == 0


def test_only_what_can_happen_is_drawn() -> None:
    for strike in draw(500, 3):
        assert strike.target in TARGETS[strike.fault]
        assert strike.moment in moments(strike.target, strike.fault)
        assert strike.mode in modes(strike.moment)


def test_longer_campaign_begins_with_the_shorter_one() -> None:
    assert draw(60, 1)[:20] == draw(20, 1)
    assert draw(20, 1) != draw(20, 2)
    assert [strike.number for strike in draw(5, 0)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_a_run_meets_each_fault_once_and_can(seed: int) -> None:
    drawn = draw(60, seed)
    runs = on_runs(drawn)
    dealt = sorted(strike.number for run in runs for strike in run)
    assert dealt == [*range(60)]
    assert len(runs) <= 30
    for run in runs:
        assert len({strike.mode for strike in run}) == 1
        at = [strike.moment for strike in run]
        once = [moment for moment in at if moment in (Moment.STARTING, Moment.VALIDATION)]
        assert at[: len(once)] == once == sorted(set(once), key=list(Moment).index)
        steps = [first_step(strike) for strike in run[len(once) :]]
        assert len(steps) <= MAX_STEPS
        assert steps == sorted(steps)
        switches = Moment.SWITCH in at
        assert not any(
            switches and strike.target is Target.TP_WORKER and strike.moment is not Moment.SWITCH
            for strike in run
        )
