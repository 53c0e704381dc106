"""SpecActor's paper prints figures that refute some assumptions about its drafters."""

from dataclasses import replace

import pytest

from benchmarks.papers.drafter_assumptions import (
    APART,
    AT_256,
    GRID,
    LAST,
    PRINTS,
    VANILLA,
    Assumption,
    PaperPrint,
    Spread,
    refuted,
)
from benchmarks.papers.present.grid import grid_spreads
from benchmarks.papers.settings import SETTINGS
from benchmarks.papers.specactor_grid import Brought, GridPoint, simulate_grid
from benchmarks.papers.speculation_case import Case
from schemas.simulate import ClusterLayout

MET = {AT_256: 0.97, VANILLA: 1.03, LAST: 0.6, APART: 0.75}
(SETTING,) = SETTINGS["specactor"]
SPEC = SETTING.spec.model_copy(
    update={"num_prompts": 64, "prompts_per_step": 16, "group_size": 10, "num_steps": 8}
)
ANYTHING = tuple(replace(one, tolerance=10.0) for one in PRINTS)


def test_a_range_has_its_tolerance_on_either_side():
    one = PaperPrint("a", 1.0, 2.0, 0.5, "somewhere")
    assert [one.met(value) for value in (0.49, 0.5, 2.5, 2.51)] == [False, True, True, False]
    assert one.printed == "1 to 2 +- 0.5"


@pytest.mark.parametrize(
    ("name", "value"), [(AT_256, 1.2), (VANILLA, 0.9), (VANILLA, 1.2), (LAST, 0.3), (LAST, 0.9)]
)
def test_one_missed_figure_refutes_an_assumption(name, value):
    assert refuted(MET) is None
    assert refuted(MET | {name: value}).name == name
    assert refuted(MET | {name: value}, ANYTHING) is None


def test_figures_not_binding_or_missing_refute_nothing():
    assert refuted(MET | {APART: 1.1}) is None
    binding = [replace(one, binding=True) for one in PRINTS]
    assert refuted(MET | {APART: 1.1}, binding).name == APART
    assert refuted({AT_256: 0.9}) is None


def test_the_grid_varies_both_on_either_side_of_what_is_assumed():
    scales, acceptances = zip(*GRID, strict=True)
    assert min(scales) < 1.0 < max(scales)
    assert min(acceptances) < 0.78 < max(acceptances)
    assert len(GRID) == len(set(scales)) * len(set(acceptances))


def test_a_spread_has_the_median_and_both_ends():
    assert Spread.of([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="nothing follows"):
        Spread.of([])


def point(scale: float, speedup: float) -> GridPoint:
    return GridPoint(
        Assumption(scale, 0.7), MET, Brought(speedup, 1.5, speedup + 0.1, speedup + 0.2, 2.5)
    )


def test_figures_are_medians_of_the_points_that_stand():
    spreads = grid_spreads([point(1.0, 1.1), point(0.5, 1.4), point(0.7, 1.2)])
    assert spreads["rollout_speedup"] == (1.2, 1.1, 1.4)
    assert spreads["over_coupled"].median == 1.5
    assert spreads["ranked_rollout_speedup"].median == pytest.approx(1.3)
    assert spreads["even_ends_rollout_speedup"].median == pytest.approx(1.4)


@pytest.fixture(scope="module")
def case():
    return Case.draw(SPEC, ClusterLayout(num_engines=10, tp_degree=4), 8, 0)


def look(case, grid, prints):
    return simulate_grid(case, grid, lambda _: None, prints)


def test_a_point_that_meets_the_prints_is_simulated_whole(case):
    (one,) = look(case, [Assumption(1.0, 0.8)], ANYTHING)
    assert set(one.found) == {print.name for print in PRINTS}
    assert 1.0 < one.brought.speedup < one.brought.bound
    assert one.brought.speedup != one.brought.ranked < one.brought.bound
    assert one.brought.ranked != one.brought.even_ends < one.brought.bound


def test_a_point_that_misses_one_is_left_there(case):
    """Negative control: no figure of the paper fits drafters that are free and nearly always
    right."""
    (free,) = look(case, [Assumption(0.01, 0.97)], PRINTS)
    assert free.found.keys() == {AT_256}
    assert not free.brought
    assert free.found[AT_256] > 1.5


def test_a_column_ends_where_speculation_brings_too_little(case):
    prints = [replace(one, tolerance=0.0 if one.name == VANILLA else 10.0) for one in PRINTS]
    prints = [replace(one, low=1.2, high=9.0) if one.name == VANILLA else one for one in prints]
    grid = [Assumption(1.0, p) for p in (0.5, 0.6, 0.7, 0.8, 0.9)]
    looked = look(case, grid, prints)
    assert [one.assumed.acceptance for one in looked] == sorted(
        (one.assumed.acceptance for one in looked), reverse=True
    )
    assert looked[0].brought
    assert not looked[-1].brought
    assert looked[-1].found[VANILLA] < 1.2
    assert len(looked) < len(grid)


def test_slow_drafters_draft_as_often_right_and_bring_less(case):
    slow = case.assuming(Assumption(2.0, 0.78))
    assert slow.acceptances == case.acceptances
    assert slow.latency.draft_s("Qwen2.5-0.5B", 8, 3) == pytest.approx(
        2 * case.latency.draft_s("Qwen2.5-0.5B", 8, 3)
    )
