"""Replays a step's rollout with a latency model, with all techniques or without one. Pure.

    requests ─► a copy of each on its first engine ─► moves, in order of time ─► the last end

Engines begin at their recorded times. Requests keep their recorded lengths and tokens per pass.
Time that is not decoding is `EngineCosts.rest_s` and comes first. The cost of a move is left out.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from refrain.engines.accounting.step_requests import DEFERRED, StepRequest, begin_s
from refrain.engines.latency.forecast import Unfinished, fields_of, forecast
from refrain.engines.latency.interface import Latency
from refrain.schemas.timeline import MoveKind, MoveRecord, Technique

MOVED_BY = {
    Technique.MIGRATION: MoveKind.MIGRATED,
    Technique.RACING: MoveKind.RACED,
    Technique.SWITCHING: MoveKind.RESHAPED,
}
MAX_MOMENTS = 6
"""Most moments of a replay at which moves happen. Neighbouring moves share a moment."""
MAX_SEGMENTS = 8
"""Most segments of one engine's forecast."""


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Parts of one engine's time."""

    latency: Latency
    tp_degree: int = 1
    draft_s: float = 0.0
    """Seconds of drafting for one step of the batch, as measured."""
    rest_s: float = 0.0
    """Seconds that are not decoding, mainly prefill."""
    plain_error: float = 0.0
    """Standard error of the time predicted for passes without drafts, as a share of it."""


@dataclass(frozen=True, slots=True)
class _Copy(Unfinished):
    """A request on an engine."""

    number: int = 0
    """Number of the request. All its copies have the same."""
    counts: bool = True
    """Whether this copy finishes first."""


_Event = tuple[float, int, MoveRecord | None]
"""(time, number of a request, its move). Without a move, the raced request has finished and its
other copies are withdrawn."""


class Replays:
    """Replays of one rollout."""

    def __init__(
        self,
        requests: Sequence[StepRequest],
        moves: Iterable[MoveRecord],
        costs: Mapping[int, EngineCosts],
        max_num_seqs: int,
    ) -> None:
        """See `engines.accounting.savings.step_savings` for the arguments."""
        self._requests = requests
        self._numbers = {request.id: number for number, request in enumerate(requests)}
        self._costs, self._max_num_seqs = costs, max_num_seqs
        self._moves: dict[int, list[MoveRecord]] = defaultdict(list)
        for move in sorted(moves, key=lambda move: move.at_s):
            if move.id in self._numbers and move.kind is not MoveKind.DEFERRED:
                self._moves[self._numbers[move.id]].append(move)
        self._paces = self._mean_paces()

    def rollout_s(self, without: Technique | None = None) -> float:
        """Return the seconds from the first request's start to the last one's end."""
        left_out = MOVED_BY.get(without) if without else None
        moves = {
            number: [move for move in own if move.kind is not left_out]
            for number, own in self._moves.items()
        }
        drafted = without is not Technique.DRAFTING
        engines = {e: _Engine(costs, self._max_num_seqs) for e, costs in self._costs.items()}
        for number, request in enumerate(self._requests):
            engine = engines[request.first.engine]
            engine.begin(request.first.start_s)
            # An overtaken request is slow, also when the race that it lost is left out.
            winner = self._winner(number)
            counts = winner is None or winner not in moves[number]
            slow = winner is not None
            engine.batch[number] = self._copy(number, slow, drafted, counts=counts)
        for events in self._moments(moves):
            at_s = events[0][0]
            for _, number, move in events:
                if move:
                    self._make(number, move, at_s, engines, drafted)
                else:
                    for engine in engines.values():
                        engine.drop_overtaken(number, at_s)
        return max(engine.finish_s() for engine in engines.values()) - begin_s(self._requests)

    def _make(
        self,
        number: int,
        move: MoveRecord,
        at_s: float,
        engines: Mapping[int, "_Engine"],
        drafted: bool,
    ) -> None:
        holders = [index for index, engine in engines.items() if number in engine.batch]
        if not holders or move.to_engine in holders:
            return
        # If an earlier move is left out, the request is on another engine than recorded.
        origin = engines[move.from_engine if move.from_engine in holders else holders[0]]
        copy = origin.at(number, at_s)
        if copy is None:
            return
        if move.kind is MoveKind.RACED:
            wins = move == self._winner(number)
            copy = replace(
                self._copy(number, not wins, drafted, counts=wins),
                context_tokens=copy.context_tokens,
                remaining_tokens=copy.remaining_tokens,
            )
        else:
            del origin.batch[number]
        engines[move.to_engine].join(copy, at_s)

    def _winner(self, number: int) -> MoveRecord | None:
        """Return the move that made the winning copy, or None if no copy won."""
        at = self._requests[number].engine
        for move in reversed(self._moves[number]):
            if move.to_engine == at:
                if move.kind is MoveKind.RACED:
                    return move
                at = move.from_engine
        return None

    def _copy(self, number: int, slow: bool, drafted: bool, *, counts: bool) -> _Copy:
        """Return the request's copy. `slow`: at the mean pace of its first engine."""
        request = self._requests[number]
        first = request.first.engine
        pace, window = _pace([request])
        if slow:
            pace, window = self._paces.get(first, (1.0, 0.0))
        if not drafted:
            pace, window = 1.0, 0.0
        return _Copy(
            context_tokens=(request.prompt_tokens or 0)
            + request.response_tokens
            - request.step_tokens,
            remaining_tokens=max(1, request.step_tokens),
            tokens_per_pass=pace,
            window=window,
            draft_s=self._costs[first].draft_s if drafted else 0.0,
            number=number,
            counts=counts,
        )

    def _mean_paces(self) -> dict[int, tuple[float, float]]:
        """Return each engine's mean pace, over the requests that it finished and that no copy
        raced."""
        own: dict[int, list[StepRequest]] = defaultdict(list)
        for number, request in enumerate(self._requests):
            raced = any(move.kind is MoveKind.RACED for move in self._moves[number])
            if not raced and request.finish_reason != DEFERRED:
                own[request.engine].append(request)
        return {engine: _pace(requests) for engine, requests in own.items()}

    def _moments(self, moves: Mapping[int, Sequence[MoveRecord]]) -> list[list[_Event]]:
        """Return groups of events. All events of a group count as happening with its first."""
        events: list[_Event] = []
        for number, own in moves.items():
            events += [(move.at_s, number, move) for move in own]
            if any(move.kind is MoveKind.RACED for move in own):
                events.append((self._requests[number].end_s, number, None))
        events.sort(key=lambda event: event[0])
        each = max(1, ceil(len(events) / MAX_MOMENTS))
        return [events[first : first + each] for first in range(0, len(events), each)]


class _Engine:
    """One engine of a replay, on the clock of the requests."""

    def __init__(self, costs: EngineCosts, max_num_seqs: int) -> None:
        self.batch: dict[int, _Copy] = {}
        """Requests by number."""
        self._costs, self._max_num_seqs = costs, max_num_seqs
        self._clock_s = self._end_s = -inf

    def begin(self, at_s: float) -> None:
        """Start the clock when the first request arrives."""
        if self._clock_s == -inf:
            self._clock_s = at_s + self._costs.rest_s

    def join(self, copy: _Copy, at_s: float) -> None:
        self._advance(at_s)
        self.begin(at_s)
        self.batch[copy.number] = copy

    def at(self, number: int, at_s: float) -> _Copy | None:
        """Return request `number` at that time, or None if it has finished."""
        self._advance(at_s)
        return self.batch.get(number)

    def drop_overtaken(self, number: int, at_s: float) -> None:
        copy = self.batch.get(number)
        if copy and not copy.counts:
            self._advance(at_s)
            self.batch.pop(number, None)

    def finish_s(self) -> float:
        self._advance(inf)
        return self._end_s

    def _advance(self, to_s: float) -> None:
        if to_s <= self._clock_s or self._clock_s == -inf:
            return
        if self.batch:
            copies, by_s = list(self.batch.values()), to_s - self._clock_s
            course = forecast(
                self._costs.latency,
                self._costs.tp_degree,
                fields_of(copies),
                max_num_seqs=self._max_num_seqs,
                max_segments=MAX_SEGMENTS,
            )
            for place, end_s in zip(course.order, course.ends_s.tolist(), strict=True):
                if copies[place].counts and end_s <= by_s:
                    self._end_s = max(self._end_s, self._clock_s + end_s)
            self.batch = {copy.number: copy for copy in course.after(copies, by_s)}
        self._clock_s = to_s


def _pace(requests: Sequence[StepRequest]) -> tuple[float, float]:
    """Return mean tokens and draft tokens per forward pass."""
    passes = sum(request.num_passes for request in requests)
    tokens = sum(request.response_tokens for request in requests)
    return max(1.0, tokens / passes), sum(r.num_draft_tokens for r in requests) / passes
