"""Places a step's requests on its timeline: their engines over time, and rows in a lane. Pure.

rows of the store + moves of the timeline ─► requests with their stays on engines
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import floor
from typing import Any

from refrain.schemas.rollout import RequestId, Split
from refrain.schemas.timeline import Activity, MoveKind, MoveRecord, RecordedTimeline, Timeline

_CLOCKS_S = 1.0
"""Most seconds by which the clocks of a timeline and of its rollouts may differ."""
DEFERRED = "deferred"
"""Finish reason of a request that was deferred to the next step."""


@dataclass(frozen=True, slots=True)
class Stay:
    """A request's time on one engine, in seconds since the window began, possibly below 0."""

    engine: int
    start_s: float
    end_s: float
    lost: bool = False
    """Whether this is a copy that was not the first to finish."""


@dataclass(frozen=True, slots=True)
class StepRequest:
    """A request that the step finished or deferred to the next step."""

    id: RequestId
    stays: tuple[Stay, ...]
    """Stays on engines. The last one finished the request."""
    finish_reason: str
    step_tokens: int
    """Response tokens generated in this step."""
    response_tokens: int
    prompt_tokens: int | None = None
    """None if unknown, for example for a deferred request."""
    num_draft_tokens: int = 0
    """Draft tokens verified, over the whole response. `num_accepted_tokens` likewise."""
    num_accepted_tokens: int = 0
    drafter: str = ""
    reward: float | None = None
    waits: tuple[tuple[float, float], ...] = ()
    """When it waited for its environment: (from, to), in seconds since the window began."""

    @property
    def first(self) -> Stay:
        return min(self.stays, key=lambda stay: stay.start_s)

    @property
    def engine(self) -> int:
        """Engine that had it last."""
        return self.stays[-1].engine

    @property
    def end_s(self) -> float:
        return self.stays[-1].end_s

    @property
    def num_passes(self) -> int:
        """Forward passes that the response took."""
        return max(1, self.response_tokens - self.num_accepted_tokens)


def step_requests(
    recorded: RecordedTimeline, split: Split, step: int, rows: Iterable[Mapping[str, Any]]
) -> list[StepRequest]:
    """Return the requests of one step. `rows`: `Store.timed_rollouts`.

    A request that ended before the window is left out, unless it started in its engine's recorded
    work for the step: an earlier process may have finished it.
    """
    begin_s = recorded.unix_s(recorded.timeline.start_s)
    moves: dict[RequestId, list[MoveRecord]] = defaultdict(list)
    for move in step_moves(recorded.timeline, split, step):
        moves[move.id].append(move)
    known_s = _known_since_s(recorded, f"{split}/{step}")
    own = {
        RequestId(split, step, row["prompt_key"], row["sample_index"]): row
        for row in rows
        if row["finished_s"] > begin_s or row["started_s"] >= known_s.get(row["engine"], begin_s)
    }
    begins_s = _begins_s((row for id, row in own.items() if id not in moves), begin_s)
    found = [_finished(id, row, moves.pop(id, []), begins_s, begin_s) for id, row in own.items()]
    return [*found, *_deferred(moves, begins_s)]


def step_moves(timeline: Timeline, split: Split, step: int) -> list[MoveRecord]:
    """Return the moves of the step's requests in order of time. `at_s` counts from the window."""
    moves = timeline.moves_in_order()
    return [move for move in moves if (move.id.split, move.id.step) == (split, step)]


def begin_s(requests: Iterable[StepRequest]) -> float:
    """Return the start of the first request."""
    return min(stay.start_s for request in requests for stay in request.stays)


def first_free_rows(intervals: Sequence[tuple[float, float]], grain_s: float = 0.0) -> list[int]:
    """Return a row for each interval (start, end): the lowest that is free when it begins.

    With `grain_s`, starts are rounded down to a multiple of it. Among equal starts, the shortest
    come first.
    """
    if grain_s:
        intervals = [(floor(start_s / grain_s) * grain_s, end_s) for start_s, end_s in intervals]
    rows = [0] * len(intervals)
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for i in sorted(range(len(intervals)), key=lambda i: intervals[i]):
        start_s, end_s = intervals[i]
        while busy and busy[0][0] <= start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        rows[i] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end_s, rows[i]))
    return rows


def _known_since_s(recorded: RecordedTimeline, label: str) -> dict[int, float]:
    """Return the Unix time at which each engine's work for the step began, as far as recorded."""
    since_s: dict[int, float] = {}
    for span in recorded.timeline.spans:
        if span.activity is Activity.ROLLOUT and span.label == label:
            start_s = recorded.unix_s(span.start_s) - _CLOCKS_S
            since_s[span.engine] = min(start_s, since_s.get(span.engine, start_s))
    return since_s


def _begins_s(rows: Iterable[Mapping[str, Any]], begin_s: float) -> dict[int, float]:
    """Return the start of each engine's first request; key -1: the first of all. `rows`: requests
    that never moved."""
    begins_s: dict[int, float] = {}
    for row in rows:
        started_s = row["started_s"] - begin_s
        for engine in (row["engine"], -1):
            begins_s[engine] = min(started_s, begins_s.get(engine, started_s))
    return begins_s


def _finished(
    id: RequestId,
    row: Mapping[str, Any],
    moves: Sequence[MoveRecord],
    begins_s: Mapping[int, float],
    begin_s: float,
) -> StepRequest:
    started_s, finished_s = row["started_s"] - begin_s, row["finished_s"] - begin_s
    stays = _stays(row["engine"], started_s, finished_s, moves, begins_s)
    waits = tuple((from_s - begin_s, to_s - begin_s) for from_s, to_s in row["waits"])
    same = (field.name for field in fields(StepRequest)[2:-1])
    return StepRequest(id, stays, **{name: row[name] for name in same}, waits=waits)


def _stays(
    engine: int,
    started_s: float,
    finished_s: float,
    moves: Sequence[MoveRecord],
    begins_s: Mapping[int, float],
) -> tuple[Stay, ...]:
    """Return all stays. `engine` finished the request and started it at `started_s`."""
    moves = [move for move in moves if move.kind is not MoveKind.DEFERRED]
    if not moves:
        return (Stay(engine, started_s, finished_s),)
    first = moves[0].from_engine
    first_s = begins_s.get(first, begins_s.get(-1, started_s))
    present = {first: min(first_s, moves[0].at_s)}
    past = []
    for move in moves:
        if move.kind is not MoveKind.RACED and move.from_engine in present:
            past.append(Stay(move.from_engine, present.pop(move.from_engine), move.at_s))
        present[move.to_engine] = move.at_s
    # A request that moved because its engine died has no record of the move.
    last_s = present.pop(engine, started_s)
    lost = [Stay(other, start_s, finished_s, lost=True) for other, start_s in present.items()]
    return (*past, *lost, Stay(engine, last_s, finished_s))


def _deferred(
    moves: Mapping[RequestId, Sequence[MoveRecord]], begins_s: Mapping[int, float]
) -> Iterable[StepRequest]:
    for id, own in moves.items():
        *before, last = own
        if last.kind is MoveKind.DEFERRED:
            start_s = begins_s.get(last.from_engine, begins_s.get(-1, last.at_s))
            stays = _stays(last.from_engine, min(start_s, last.at_s), last.at_s, before, begins_s)
            yield StepRequest(
                id=id,
                stays=stays,
                finish_reason=DEFERRED,
                step_tokens=last.num_tokens,
                response_tokens=last.num_tokens,
            )
