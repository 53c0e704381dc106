"""Forecast of when an engine finishes its requests: the remaining time of PAT, Algorithm 1. Pure.

    requests ─► when each starts and ends, in steps
                 └─► segments from one end to the next: batch, context, window
                      └─latency─► seconds of a step ─► seconds of all

A request with c tokens of context and r remaining tokens takes r / rate steps, where rate is its
tokens per forward pass. After u steps it has c + k rate u tokens, where k counts each sampled token
and its share of those that an environment gives. A step costs `decode_s(tp, B, T)`,
or `verify_s(tp, B, T, w)` with the mean window w of the batch.

Deviations: in the paper all samples run to the maximum length in one batch. Here each has its own
length (`remaining_tokens`), so the batch shrinks as they end. Drafting adds the `draft_s` of the
requests, which is 0 if drafting overlaps with the GPU.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Protocol, Self, TypeVar

import numpy as np

from refrain.engines.latency.interface import Latency

MAX_SEGMENTS = 32
"""Most segments of one forecast."""
_ROUNDING = 1e-6
"""Remaining tokens below which a request counts as finished: they are rounding errors."""


class Request(Protocol):
    """Unfinished request."""

    @property
    def remaining_tokens(self) -> float: ...

    def advanced(self, tokens: float) -> Self:
        """Return the request with so many more response tokens."""
        ...


R = TypeVar("R", bound=Request)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Unfinished request with its pace; implements `Request`."""

    context_tokens: float
    """Tokens of prompt and response so far."""
    remaining_tokens: float
    """Expected further response tokens, above 0."""
    tokens_per_pass: float = 1.0
    """Tokens that one forward pass adds: an acceptance length. 1 without speculation."""
    window: float = 0
    """Mean number of draft tokens that one forward pass verifies."""
    draft_s: float = 0.0
    """Seconds of drafting before each step while this request is in the batch. A batch drafts for
    all of its requests together, so the longest time counts."""
    context_per_token: float = 1.0
    """Tokens by which the context grows for each response token."""

    def advanced(self, tokens: float) -> Self:
        """Return the request with so many more response tokens."""
        context = self.context_tokens + self.context_per_token * tokens
        return replace(
            self, context_tokens=context, remaining_tokens=self.remaining_tokens - tokens
        )


FIELDS = tuple(field.name for field in fields(Unfinished))


@dataclass(frozen=True, slots=True)
class Segments:
    """Batch of one engine over time, from now until it is empty. Axes: segments S, requests R."""

    starts: np.ndarray
    """Step at which each request joins the batch, [R]."""
    passes: np.ndarray
    """Number of steps that each request takes, fractional; [R]."""
    points: np.ndarray
    """Step at which each segment begins, and the end of the last one; [S + 1]."""
    presence_SR: np.ndarray
    """Share of a segment's steps in which a request is in the batch."""
    context_tokens: np.ndarray
    """Context tokens of the whole batch, averaged over the steps of each segment; [S]."""

    @property
    def num_steps(self) -> np.ndarray:
        """Number of steps of each segment, [S]."""
        return self.points[1:] - self.points[:-1]

    @property
    def batches(self) -> np.ndarray:
        """Number of requests in each segment, rounded; [S]."""
        return np.maximum(1, np.rint(self.presence_SR.sum(axis=1))).astype(int)

    def means(self, of_requests: np.ndarray) -> np.ndarray:
        """Return the mean of a value over the requests in each segment; [S]."""
        return self.presence_SR @ of_requests / self.presence_SR.sum(axis=1)


@dataclass(frozen=True, slots=True)
class BatchForecast:
    """Forecast of one engine, from now until it is empty."""

    order: list[int]
    """Places of the requests, in the order in which they start; [R]."""
    tokens_per_pass: np.ndarray
    """In this order, [R]."""
    segments: Segments
    seconds: np.ndarray
    """Seconds from now at which each segment begins, and the end of the last one; [S + 1]."""

    @property
    def finish_s(self) -> float:
        return float(self.seconds[-1])

    @property
    def ends_s(self) -> np.ndarray:
        """Seconds until each request finishes, in `order`; [R]. Linear within a segment."""
        ends = self.segments.starts + self.segments.passes
        return np.interp(ends, self.segments.points, self.seconds)

    def after(self, requests: Sequence[R], seconds: float) -> list[R]:
        """Return those of the requests that are still unfinished after so many seconds."""
        step = np.interp(seconds, self.seconds, self.segments.points)
        passes = np.minimum(np.maximum(step - self.segments.starts, 0.0), self.segments.passes)
        gained = (passes * self.tokens_per_pass).tolist()
        return [
            requests[place].advanced(tokens)
            for place, tokens in zip(self.order, gained, strict=True)
            if requests[place].remaining_tokens - tokens > _ROUNDING
        ]


def fields_of(requests: Sequence[Unfinished]) -> np.ndarray:
    """Return the fields of each request, float64 [R, 6]."""
    return np.array([[getattr(request, name) for name in FIELDS] for request in requests])


def forecast(
    latency: Latency,
    tp_degree: int,
    fields_RF: np.ndarray,
    *,
    max_num_seqs: int = 256,
    max_segments: int = MAX_SEGMENTS,
    max_context_tokens: float = math.inf,
) -> BatchForecast:
    """Return the forecast of at least one request. The first `max_num_seqs` to start are those that
    take longest; the others start as places become free.

    `fields_RF`: the fields of `Unfinished`, a request in each row. `max_context_tokens`: tokens
    that the KV cache holds. A larger batch runs in parts and takes proportionally more steps.
    """
    assert len(fields_RF)
    assert (fields_RF[:, 1] > 0).all()
    order = np.argsort(-fields_RF[:, 1] / fields_RF[:, 2], kind="stable")
    context, remaining, rates, windows, draft_s, growth = fields_RF[order].T
    segments = _plan_segments(
        remaining / rates, context, rates * growth, max_num_seqs, max_segments
    )
    at_each = zip(
        segments.batches.tolist(),
        segments.context_tokens.tolist(),
        segments.means(windows).round(6).tolist(),
        strict=True,
    )
    steps_s = np.array([step_s(latency, tp_degree, *at) for at in at_each])
    steps_s += np.where(segments.presence_SR > 0, draft_s, 0.0).max(axis=1)
    num_steps = segments.num_steps * np.maximum(1.0, segments.context_tokens / max_context_tokens)
    seconds = np.concatenate(([0.0], np.cumsum(num_steps * steps_s)))
    return BatchForecast(order.tolist(), rates, segments, seconds)


def step_s(
    latency: Latency, tp_degree: int, batch: int, context_tokens: float, window: float
) -> float:
    """Return the time of a step whose requests verify `window` draft tokens on average. It is
    linear between whole windows."""
    below = math.floor(window)
    share = window - below
    seconds = _whole_step_s(latency, tp_degree, batch, context_tokens, below)
    if share:
        above_s = _whole_step_s(latency, tp_degree, batch, context_tokens, below + 1)
        seconds += share * (above_s - seconds)
    return seconds


def _whole_step_s(
    latency: Latency, tp_degree: int, batch: int, context_tokens: float, window: int
) -> float:
    if window:
        return latency.verify_s(tp_degree, batch, context_tokens, window)
    return latency.decode_s(tp_degree, batch, context_tokens)


def _plan_segments(
    passes: np.ndarray,
    context_tokens: np.ndarray,
    growth: np.ndarray,
    max_num_seqs: int,
    max_segments: int,
) -> Segments:
    """Return the segments from one end of a request to the next.

    `passes`: steps of each request, the longest first.
    `context_tokens`: context of each request at its start.
    `growth`: tokens that a step adds to the context of each.
    `max_segments`: if there are more ends, neighbours are merged. Fewer are merged near the last
        end, where the batch changes most.
    """
    starts = _starts(passes, max_num_seqs)
    points = _merge(np.unique(np.concatenate(([0.0], starts + passes))), max_segments)
    done_PR = np.minimum(np.maximum(points[:, None] - starts, 0.0), passes)
    steps_SR = done_PR[1:] - done_PR[:-1]
    halfway_SR = (done_PR[1:] + done_PR[:-1]) / 2
    tokens_S = (steps_SR * (context_tokens + growth * halfway_SR)).sum(axis=1)
    widths_S = points[1:] - points[:-1]
    return Segments(starts, passes, points, steps_SR / widths_S[:, None], tokens_S / widths_S)


def _starts(passes: np.ndarray, max_num_seqs: int) -> np.ndarray:
    """Return the step at which each request joins the batch. Each takes the first place that
    becomes free."""
    starts = np.zeros(len(passes))
    if len(passes) <= max_num_seqs:
        return starts
    places = sorted(passes[:max_num_seqs].tolist())
    for index, steps in enumerate(passes[max_num_seqs:].tolist(), max_num_seqs):
        starts[index] = places[0]
        heapq.heapreplace(places, places[0] + steps)
    return starts


def _merge(points: np.ndarray, max_segments: int) -> np.ndarray:
    """Return the first and the last point, and some between."""
    if len(points) <= max_segments + 1:
        return points
    return points[_kept(len(points), max_segments)]


@lru_cache(1 << 10)
def _kept(num_points: int, max_segments: int) -> np.ndarray:
    from_last = np.geomspace(1, num_points, max_segments + 1).astype(int)
    return num_points - np.unique(from_last)[::-1]
