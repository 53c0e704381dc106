"""Allocations of engines to ranking groups are close to the best of all possible ones."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.histopipe.allocation import (
    INTERCEPTS,
    SLACK,
    allocate_engines,
    cost,
    fit_line,
    line,
    tabulate,
)
from refrain.engines.histopipe.ranking import divide_evenly


def period_s(table, allocation) -> float:
    return cost(table, allocation)[0]


def compositions(total, num_parts):
    for cuts in combinations(range(1, total), num_parts - 1):
        ends = (0, *cuts, total)
        yield tuple(b - a for a, b in pairwise(ends))


@st.composite
def cases(draw, most_engines=11):
    """Draw (times, groups, engines). A group takes the time of its longest response plus work that
    its engines share."""
    num_groups = draw(st.integers(1, 4))
    num_engines = draw(st.integers(num_groups, most_engines))
    seconds = st.floats(0.1, 100)
    groups = draw(st.lists(st.tuples(seconds, seconds), min_size=num_groups, max_size=num_groups))
    return lambda group, num: groups[group][0] + groups[group][1] / num, num_groups, num_engines


@given(cases(), st.sampled_from(INTERCEPTS))
@settings(deadline=None)
def test_the_binary_search_is_exact(case, intercept):
    times, num_groups, num_engines = case
    table, heights = tabulate(*case), line(intercept, num_groups)

    def above(allocation):
        return max(times(g, num) / heights[g] for g, num in enumerate(allocation))

    found = fit_line(table, heights, num_engines)
    assert sum(found) == num_engines
    assert min(found) > 0
    best = min(above(allocation) for allocation in compositions(num_engines, num_groups))
    assert above(found) == pytest.approx(best)


@given(cases(most_engines=40))
@settings(deadline=None)
def test_engines_are_conserved_and_the_period_no_worse_than_even(case):
    _, num_groups, num_engines = case
    found = allocate_engines(*case)
    assert len(found) == num_groups
    assert sum(found) == num_engines
    assert min(found) > 0
    even = divide_evenly(num_engines, num_groups)
    table = tabulate(*case)
    assert period_s(table, found) <= period_s(table, even)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_period_is_close_to_the_smallest(case):
    _, num_groups, num_engines = case
    table = tabulate(*case)
    best = min(period_s(table, other) for other in compositions(num_engines, num_groups))
    assert period_s(table, allocate_engines(*case)) <= best * (1 + SLACK) * (1 + 1e-9)


def test_period_covers_a_step_and_its_mirror():
    table = np.array([[1.0, 0.5], [10.0, 6.0]])
    # Engines 0 to 2 take 1, 6, 6 seconds, and 6, 6, 1 in the next step.
    assert period_s(table, (1, 2)) == 12.0
    assert cost(table, (1, 2)) == (12.0, 13.0)
    # Here they take 0.5, 0.5, 10 seconds, then 10, 0.5, 0.5.
    assert period_s(table, (2, 1)) == 10.5


def test_times_that_rise_with_the_engines_change_nothing():
    rising = tabulate(lambda group, num: 1.0 + num * (group + 1), 2, 4)
    assert rising.tolist() == [[2.0] * 3, [3.0] * 3]


def test_unhelped_groups_get_no_surplus_engines():
    def times(group, num):
        return 10.0 if group == 0 else 80.0 / num

    # The line allows group 0 its 10 s and group 1 20 s, which is 80 s over 4 engines.
    assert fit_line(tabulate(times, 2, 5), line(0.0, 2), 5) == (1, 4)


def test_engines_left_over_go_to_where_the_maximum_is():
    def times(group, num):
        return [5.0, 3.0, 9.0][group] if num < 3 else [5.0, 3.0, 8.0][group]

    # Group 0 sets the maximum of 5 s whatever it gets, so it gets the three spare engines.
    table = tabulate(times, 3, 6)
    assert fit_line(table, np.array([1.0, 1.0, 9.0]), 6) == (4, 1, 1)


def test_slightly_longer_period_may_free_engines():
    # (5, 1) has a period of 110 s and 150 busy seconds, (4, 2) has 106 s and 232. Even takes 126 s.
    table = [[30.0, 30.0, 30.0, 10.0, 10.0], [100.0, 96.0, 96.0, 96.0, 96.0]]
    assert allocate_engines(lambda group, num: table[group][num - 1], 2, 6) == (5, 1)
