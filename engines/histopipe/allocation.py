"""How many engines each ranking group gets: tier 2 of RhymeRL, section 6.4. Pure.

    ascending step    engine 0 ─ short ─┬─ .. ─┬─── longest ─── engine N - 1
    descending step   engine 0 ─ longest ──────┴─ .. ─┬─ short ─ engine N - 1

Engine i has the group of engine N - 1 - i in the next step; where the times of the groups are close
to a line, all engines need the same for two steps. The least number of engines with which group g
ends by T * h_g on the line h_g = c + (1 - c) (g + 1) / G is found by binary search over T, for
several intercepts c. What counts is then the period, the longest that an engine needs for two
steps: from the even split and every line a beam search moves engines between groups. Of the
allocations whose period is within `SLACK` of the smallest found, that one wins whose engines are
busy for the fewest seconds: with the smallest period alone all are busy throughout, and one
response that is longer than expected delays everybody.

Deviations: the paper prints neither its line nor how a plan is chosen among several; and it seeks a
line where this seeks what the line is for, so it is never worse than the even split.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product

import numpy as np

from engines.histopipe.ranking import divide_evenly

Times = Callable[[int, int], float]
"""(ranking group, engines) -> seconds."""

INTERCEPTS = tuple(np.linspace(0.0, 1.0, 11).tolist())
"""Intercepts of the lines that are tried; 1 gives every group the same time."""
BEAM_WIDTH = 12
PATIENCE = 3
"""Rounds without gain after which the search ends."""
SLACK = 0.05
"""Share of the smallest period that may be given up for engines with time to spare when a response
is longer than expected."""
MOVES = (1, 2, 4)
"""Engines that go from one group to another at once."""


def allocate_engines(times: Times, num_groups: int, num_engines: int) -> tuple[int, ...]:
    """Engines of each ranking group, from the shortest: each at least 1, `num_engines` in all.

    Where `times` rises with the engines, by rounding, an engine more is taken to change nothing.
    The period is never above that of the even split, and within `SLACK` of the smallest there is
    wherever all allocations were tried (`tests/histopipe/test_allocation.py`).
    """
    assert 0 < num_groups <= num_engines
    table = tabulate(times, num_groups, num_engines)
    lines = [line(intercept, num_groups) for intercept in INTERCEPTS]
    starts = [divide_evenly(num_engines, num_groups)]
    starts += [fit_line(table, heights, num_engines) for heights in lines]
    costs = _search(table, starts)
    even_s, best_s = costs[starts[0]][0], min(costs.values())[0]
    limit_s = min(even_s, best_s * (1 + SLACK))
    fitting = {allocation: of for allocation, of in costs.items() if of[0] <= limit_s}
    return min(fitting, key=lambda allocation: fitting[allocation][::-1])


def tabulate(times: Times, num_groups: int, num_engines: int) -> np.ndarray:
    """Seconds by [group, engines - 1], never rising with the engines."""
    most = num_engines - num_groups + 1
    rows = [[times(group, num) for num in range(1, most + 1)] for group in range(num_groups)]
    return np.minimum.accumulate(np.array(rows, dtype=float), axis=1)


def line(intercept: float, num_groups: int) -> np.ndarray:
    """h_g, which ends at 1."""
    return intercept + (1 - intercept) * np.arange(1, num_groups + 1) / num_groups


def fit_line(table: np.ndarray, heights: np.ndarray, num_engines: int) -> tuple[int, ...]:
    """The allocation with the smallest max_g t_g / h_g.

    Exact: the optimum is one of the finitely many t_g(dp) / h_g, and as times fall, T is feasible
    when the least engines that each group needs for T * h_g are no more than there are. Those left
    over go one by one to where the maximum is.
    """
    ratios = table / heights[:, None]
    candidates = np.unique(ratios)

    def suffices(limit: float) -> bool:
        return bool(_least_engines(ratios, limit).sum() <= num_engines)

    least = bisect_left(candidates, True, hi=len(candidates) - 1, key=suffices)
    allocation = _least_engines(ratios, candidates[least])
    while allocation.sum() < num_engines:
        now = ratios[np.arange(len(ratios)), allocation - 1]
        allocation[np.argmax(now)] += 1
    return tuple(allocation.tolist())


def cost(table: np.ndarray, allocation: Sequence[int]) -> tuple[float, float]:
    """Objective, to be minimised: the period, then the seconds that all engines are busy in a
    step."""
    of_group = table[np.arange(len(table)), np.asarray(allocation) - 1]
    # Of every engine in an ascending step.
    seconds = np.repeat(of_group, allocation)
    return float((seconds + seconds[::-1]).max()), float(seconds.sum())


def _least_engines(ratios: np.ndarray, limit: float) -> np.ndarray:
    """Engines that each group needs for a ratio within the limit; more than there are where nothing
    is enough."""
    within = ratios <= limit
    return np.where(within.any(axis=1), within.argmax(axis=1), ratios.shape[1] * len(ratios)) + 1


def _search(
    table: np.ndarray, starts: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], tuple[float, float]]:
    """Cost of every allocation that a beam search from here came across, the starts included.

    Each round moves engines between two groups, in all ways and all allocations of the beam, and
    keeps the cheapest that are new, be they dearer than before: often two moves help where neither
    does alone.
    """
    known = {start: cost(table, start) for start in starts}
    front, best, num_vain = list(known), min(known.values()), 0
    while front and num_vain < PATIENCE:
        new = {other for one in front for other in _neighbours(one)} - known.keys()
        costs = {other: cost(table, other) for other in sorted(new)}
        front = sorted(costs, key=costs.__getitem__)[:BEAM_WIDTH]
        known.update(costs)
        cheapest = min(costs.values(), default=best)
        num_vain = 0 if cheapest < best else num_vain + 1
        best = min(best, cheapest)
    return known


def _neighbours(allocation: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    pairs = permutations(range(len(allocation)), 2)
    for (giver, taker), num in product(pairs, MOVES):
        if allocation[giver] > num:
            moved = list(allocation)
            moved[giver] -= num
            moved[taker] += num
            yield tuple(moved)
