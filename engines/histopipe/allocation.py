"""Allocates engines to ranking groups: tier 2 of RhymeRL, section 6.4. Pure.

    ascending step    engine 0 ─ short ─┬─ .. ─┬─── longest ─── engine N - 1
    descending step   engine 0 ─ longest ──────┴─ .. ─┬─ short ─ engine N - 1

In the next step, engine i has the group that engine N - 1 - i has now. If the times of the groups
lie near a line, all engines take the same time for two steps. So we look for allocations near a
line h_g = c + (1 - c) (g + 1) / G, for several intercepts c: a binary search over T finds the
fewest engines with which each group g ends by T * h_g. These allocations and the even split are the
starts of a beam search, which moves engines between groups.

The measure is the period: the longest time that an engine needs for two steps. Among the
allocations with a period within `SLACK` of the smallest found, we take the one whose engines are
busy for the fewest seconds. The smallest period alone would keep all engines busy throughout, and
one response that is longer than expected would delay everything.

Deviations: the paper gives neither its line nor how it chooses among plans. It looks for a line.
Here the period counts, so the result is never worse than the even split.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product

import numpy as np

from refrain.engines.histopipe.ranking import divide_evenly

Times = Callable[[int, int], float]
"""(ranking group, engines) -> seconds."""

INTERCEPTS = tuple(np.linspace(0.0, 1.0, 11).tolist())
"""Intercepts of the lines to try. With 1, every group has the same time."""
BEAM_WIDTH = 12
PATIENCE = 3
"""Rounds without a gain before the search ends."""
SLACK = 0.05
"""Share of the smallest period to give up for spare time, in case a response is longer than
expected."""
MOVES = (1, 2, 4)
"""Numbers of engines to move between two groups at once."""


def allocate_engines(times: Times, num_groups: int, num_engines: int) -> tuple[int, ...]:
    """Return the engines of each ranking group, shortest first: at least 1 each, `num_engines` in
    all.

    If rounding makes `times` rise with the engines, the extra engine counts as no change. The
    period is never above that of the even split. In all cases where every allocation was tried, it
    was within `SLACK` of the smallest (`tests/histopipe/test_allocation.py`).
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
    """Return seconds by [group, engines - 1], never rising with the engines."""
    most = num_engines - num_groups + 1
    rows = [[times(group, num) for num in range(1, most + 1)] for group in range(num_groups)]
    return np.minimum.accumulate(np.array(rows, dtype=float), axis=1)


def line(intercept: float, num_groups: int) -> np.ndarray:
    """Return h_g of each group. The last is 1."""
    return intercept + (1 - intercept) * np.arange(1, num_groups + 1) / num_groups


def fit_line(table: np.ndarray, heights: np.ndarray, num_engines: int) -> tuple[int, ...]:
    """Return the allocation with the smallest max_g t_g / h_g.

    The result is exact: the optimum is one of the finitely many t_g(dp) / h_g. Times fall with the
    engines, so T is feasible if the fewest engines that the groups need for T * h_g are enough. The
    engines left over go one by one to the group with the maximum.
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
    """Return (period, busy seconds of all engines in one step), to be minimized in that order."""
    of_group = table[np.arange(len(table)), np.asarray(allocation) - 1]
    # Seconds of each engine in an ascending step.
    seconds = np.repeat(of_group, allocation)
    return float((seconds + seconds[::-1]).max()), float(seconds.sum())


def _least_engines(ratios: np.ndarray, limit: float) -> np.ndarray:
    """Return the fewest engines that keep each group's ratio within the limit. If none do, return
    more than exist."""
    within = ratios <= limit
    return np.where(within.any(axis=1), within.argmax(axis=1), ratios.shape[1] * len(ratios)) + 1


def _search(
    table: np.ndarray, starts: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], tuple[float, float]]:
    """Run a beam search and return the cost of every allocation found, including the starts.

    A round moves engines between two groups of each allocation in the beam, in all ways, and keeps
    the cheapest new ones. They may cost more than before: often two moves help where neither does
    alone.
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
