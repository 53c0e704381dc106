"""How many engines each ranking group gets: tier 2 of RhymeRL, section 6.4. Pure.

    ascending step    engine 0 ─ short ─┬─ .. ─┬─── longest ─── engine N - 1
    descending step   engine 0 ─ longest ──────┴─ .. ─┬─ short ─ engine N - 1

Engine i has the group of engine N - 1 - i in the next step; where the times of the groups are close
to a line, all engines need the same for two steps. The least number of engines with which group g
ends by T * h_g on the line h_g = c + (1 - c) (g + 1) / G is found by binary search over T, for
several intercepts c. What counts is then the period, the longest that an engine needs for two
steps: from the even split and every line a beam search moves engines between groups, and the
smallest period wins.

Deviations: the paper prints neither its line nor how a plan is chosen among several; and it seeks a
line where this seeks what the line is for, so it is never worse than the even split.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product

import numpy as np

from engines.histopipe.ranking import divide_evenly

Times = Callable[[int, int], float]
"""(ranking group, engines) -> seconds."""

INTERCEPTS = tuple(np.linspace(0.0, 1.0, 11).tolist())
"""Of the lines that are tried; 1 gives every group the same time."""
BEAM_WIDTH = 12
PATIENCE = 3
"""Rounds without gain after which the search ends."""
MOVES = (1, 2, 4)
"""Engines that go from one group to another at once."""


def allocate_engines(times: Times, num_groups: int, num_engines: int) -> tuple[int, ...]:
    """Engines of each ranking group, from the shortest: each at least 1, `num_engines` in all.

    Where `times` rises with the engines, by rounding, an engine more is taken to change nothing.
    The period is never above that of the even split. It need not be the smallest there is, but is
    where all allocations were tried (`tests/histopipe/test_allocation.py`).
    """
    assert 0 < num_groups <= num_engines
    table = tabulate(times, num_groups, num_engines)
    lines = [line(intercept, num_groups) for intercept in INTERCEPTS]
    starts = [divide_evenly(num_engines, num_groups)]
    starts += [fit_line(table, heights, num_engines) for heights in lines]
    return _search(table, starts)


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
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _least_engines(ratios, candidates[middle]).sum() <= num_engines:
            high = middle
        else:
            low = middle + 1
    allocation = _least_engines(ratios, candidates[low])
    while allocation.sum() < num_engines:
        now = ratios[np.arange(len(ratios)), allocation - 1]
        allocation[np.argmax(now)] += 1
    return tuple(allocation.tolist())


def engine_times(table: np.ndarray, allocation: Sequence[int]) -> np.ndarray:
    """Seconds of every engine in an ascending step."""
    chosen = table[np.arange(len(table)), np.asarray(allocation) - 1]
    return np.repeat(chosen, allocation)


def period_s(table: np.ndarray, allocation: Sequence[int]) -> float:
    """The longest that an engine needs for an ascending and a descending step."""
    return cost(table, allocation)[0]


def cost(table: np.ndarray, allocation: Sequence[int]) -> tuple[float, float]:
    """What is minimised: the period, and among equal ones the longest time of a step."""
    seconds = engine_times(table, allocation)
    return float((seconds + seconds[::-1]).max()), float(seconds.max())


def _least_engines(ratios: np.ndarray, limit: float) -> np.ndarray:
    """Of each group, for a ratio within the limit; more than there are where nothing is enough."""
    within = ratios <= limit
    return np.where(within.any(axis=1), within.argmax(axis=1), ratios.shape[1] * len(ratios)) + 1


def _search(table: np.ndarray, starts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The cheapest allocation of a beam search from here; never dearer than any start.

    Each round moves engines between two groups, in all ways and all allocations of the beam, and
    keeps the cheapest that are new, be they dearer than before: often two moves help where neither
    does alone.
    """
    front, seen, num_vain = list(dict.fromkeys(starts)), set(starts), 0
    best = min((cost(table, start), start) for start in front)
    while front and num_vain < PATIENCE:
        new = {other for one in front for other in _neighbours(one)} - seen
        ranked = sorted((cost(table, other), other) for other in new)[:BEAM_WIDTH]
        num_vain = 0 if ranked and ranked[0] < best else num_vain + 1
        best = min([best, *ranked])
        front = [allocation for _, allocation in ranked]
        seen.update(front)
    return best[1]


def _neighbours(allocation: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    pairs = permutations(range(len(allocation)), 2)
    for (giver, taker), num in product(pairs, MOVES):
        if allocation[giver] > num:
            moved = list(allocation)
            moved[giver] -= num
            moved[taker] += num
            yield tuple(moved)
