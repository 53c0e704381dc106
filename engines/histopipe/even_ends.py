"""Prompts, from the longest, cut up so that engines end together. Pure.

    longest first   | 20K 20K | 20K 16K 12K | ... | 900 800 ... 100 |       one engine each
    ends at         s 20K + c (passes of all its responses)      <= T       the least T there is

An engine takes s seconds for a step whatever its batch, and c more for each request, so it ends s
times its longest response and c times the passes of all after it began. Equal passes
(`placement.deal_groups`) give every engine one of the longest responses and a full batch beside it;
here the longest have engines with few others, and the short ones have large batches on the rest.
For a given T each engine takes as many of the prompts as end in time, the longest first, so no
split of that order has a smaller T; an engine fills up to s times 20K at least, as none need end
before the longest alone.

That is for engines that race the others' responses when they have nothing left
(`engines.specactor`): a prompt that was short and has become long is late in its large batch. Where
nobody helps, simulated steps end later than with equal passes though forecasts have them end
sooner.

More responses than an engine runs at once wait for places, and while all places are taken its steps
are as many as passes for each place: these count where they are more than the longest response's.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

_HALVINGS = 40
_LEAST_SHARE = 1e-6
"""Least share of a step that the requests of a batch take: what is measured may say none."""


def step_requests_of(seconds: Callable[[int], float], batch: int) -> float:
    """Requests whose share of a step takes as long as what a step takes without any, s / c, near
    this batch. `seconds`: of steps, by their batch."""
    at_once_s = seconds(batch)
    each_s = max(seconds(2 * batch) - at_once_s, _LEAST_SHARE * at_once_s) / batch
    return max(0.0, at_once_s / each_s - batch)


def cut_evenly(
    passes: Sequence[float],
    num_engines: int,
    *,
    step_requests: float,
    group_size: int,
    max_num_seqs: int,
) -> list[int]:
    """Engine of each prompt, none without one where there are enough.

    `passes`: of a response to each prompt, from the most, with `group_size` responses each;
    `step_requests`: as of `step_requests_of`; `max_num_seqs`: responses that run at once, at most.
    """
    assert num_engines > 0
    totals = [0.0, *accumulate(group_size * own for own in passes)]

    def filled(end: float) -> list[int]:
        """Engine of each, as far as there are engines."""
        engines: list[int] = []
        for engine in range(num_engines):
            first, num_after = len(engines), num_engines - engine - 1
            if first == len(passes):
                break
            own = min(end - step_requests * passes[first], end / (1 + step_requests / max_num_seqs))
            stop = bisect_right(totals, totals[first] + own) - 1
            stop = max(first + 1, min(stop, len(passes) - num_after))
            engines += [engine] * (stop - first)
        return engines

    low, high = step_requests * passes[0], 2 * (1 + step_requests) * totals[-1]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if len(filled(middle)) == len(passes) else (middle, high)
    return filled(high)
