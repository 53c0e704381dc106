"""Cuts the prompts, sorted by length, into shares that end together, one per engine. Pure.

    longest first   | 20K 20K | 20K 16K 12K | ... | 900 800 ... 100 |       one engine each
    ends at         s 20K + c (passes of all its responses)      <= T       the least possible T

A step of an engine takes s seconds whatever the batch, plus c seconds for each request. So an
engine ends after s times its longest response plus c times the passes of all its responses. Equal
passes (`placement.deal_groups`) give every engine one of the longest responses and a full batch.
Here the longest responses share their engines with few others, and the short ones form large
batches elsewhere. For a given T, each engine takes the longest prompts left, as many as end in
time. No split of that order has a smaller T. T is at least s times 20K, because the longest
response takes that long even alone.

Use this for engines that race the responses of others once they are free (`engines.specactor`). If
a short prompt has become long, it is late in its large batch and needs that help. Without races,
simulated steps end later than with equal passes, although forecasts say that they end sooner.

An engine with more responses than it runs at once makes some wait. While all places are taken, its
steps are its passes divided by its places. These count when they exceed the longest response's.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

_HALVINGS = 40
_LEAST_SHARE = 1e-6
"""Least share of a step that a batch's requests take. Measured latencies may say none."""


def step_requests_of(seconds: Callable[[int], float], batch: int) -> float:
    """Return s / c: the number of requests that add as much time as a step takes without any.

    It is measured between `batch` and twice as many. `seconds`: time of a step, by batch.
    """
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
    """Return the engine of each prompt. No engine stays empty if there are enough prompts.

    `passes`: passes of one response to each prompt, the most first; each prompt has `group_size`
    responses. `step_requests`: see `step_requests_of`. `max_num_seqs`: most responses that run at
    once.
    """
    assert num_engines > 0
    totals = [0.0, *accumulate(group_size * own for own in passes)]

    def filled(end: float) -> list[int]:
        """Return the engine of each prompt, until the engines are used up."""
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
