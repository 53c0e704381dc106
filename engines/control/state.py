"""A generation stage as it is expected to go on: who is where, and when each request will be there.

    RolloutView ─outlook─► StepState ─effects─► StepState as it would be after some moves
                               └─ engine by engine ─forecast─► when each request ends

A raced request ends with the first of its copies; the step ends with its last request. Times are
seconds from the moment of the view. Pure.

Deviations: a copy that has lost its race counts in its engine's batch until its own end. The pace
of a decoupled drafter, and what its drafts make of a step, are those of the batch as it is now.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from engines.latency.forecast import BatchForecast, Unfinished, forecast, step_s
from engines.latency.interface import Bounded, Latency
from engines.specactor.expectation import expected_tokens, paced_step, settled_s
from schemas.rollout import DraftSetting, RequestId

Times = dict[int, float]
"""Seconds until the end, by request."""
_coupled_tokens = lru_cache(1 << 14)(expected_tokens)


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """A request on one engine."""

    row: int
    """The request's number, the same on every engine: looked up often, where its name is slow."""
    id: RequestId
    context_tokens: float
    """Prompt and response so far."""
    remaining_tokens: float
    """Response tokens expected to come, above 0."""
    drafting: DraftSetting | None = None
    """None: not drafted for."""
    acceptance: float = 0.0
    """Probability that a draft token is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Going(Unfinished):
    """How fast a copy goes on."""

    copy: PlacedRequest

    @property
    def advanced_copy(self) -> PlacedRequest:
        context, remaining = self.context_tokens, self.remaining_tokens
        return replace(self.copy, context_tokens=context, remaining_tokens=remaining)


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine with the requests on it."""

    engine: int
    tp_degree: int
    copies: tuple[PlacedRequest, ...]
    delay_s: float = 0.0
    """Seconds until it decodes: it wakes, or computes keys and values first."""

    def find(self, row: int) -> PlacedRequest | None:
        return next((copy for copy in self.copies if copy.row == row), None)

    @property
    def context_tokens(self) -> float:
        return sum(copy.context_tokens for copy in self.copies)


@dataclass(frozen=True, slots=True)
class Course:
    """How an engine goes on."""

    engine: EngineState
    _batch: "BatchForecast[_Going] | None"
    """Once it decodes; None: it has nothing."""

    def later(self, wait_s: float) -> EngineState:
        """The engine as it would be by then."""
        engine, batch = self.engine, self._batch
        if batch is None:
            return engine
        left = batch.after(max(0.0, wait_s - engine.delay_s))
        copies = tuple(going.advanced_copy for going in left)
        return replace(engine, copies=copies, delay_s=max(0.0, engine.delay_s - wait_s))


@dataclass(frozen=True)
class Forecaster:
    """When the requests of an engine end."""

    latency: Latency
    max_num_seqs: int = 256
    """Requests that one engine decodes at a time."""

    def times_s(self, engine: EngineState) -> Times:
        """Seconds until each request ends, by row."""
        if not engine.copies:
            return {}
        course = self._course(engine)
        ends_s = (course.ends_s + engine.delay_s).tolist()
        return {going.copy.row: end_s for going, end_s in zip(course.requests, ends_s, strict=True)}

    def course(self, engine: EngineState) -> "Course":
        return Course(engine, self._course(engine) if engine.copies else None)

    def knows(self, engine: EngineState) -> bool:
        """Whether no step of its course lies beyond what the latency model was measured at; one
        that is no measurement has no such end."""
        if not engine.copies or not isinstance(self.latency, Bounded):
            return True
        segments = self._course(engine).segments
        steps = [*zip(segments.batches.tolist(), segments.context_tokens.tolist(), strict=True)]
        # Segments have means: the longest may be alone at its end.
        steps.append(
            (1, max(copy.context_tokens + copy.remaining_tokens for copy in engine.copies))
        )
        return all(self.latency.reaches(engine.tp_degree, *step) for step in steps)

    def _course(self, engine: EngineState) -> "BatchForecast[_Going]":
        """How it goes on once it decodes."""
        costs_s = self._draft_s(engine)
        step = self._step_s(engine, costs_s) if costs_s else 0.0
        going = [
            _going(copy, costs_s[copy.drafting] if copy.drafting else 0.0, step)
            for copy in engine.copies
        ]
        return forecast(self.latency, engine.tp_degree, going, max_num_seqs=self.max_num_seqs)

    def _draft_s(self, engine: EngineState) -> dict[DraftSetting, float]:
        """Drafting time by setting: of all its window if coupled, else of a token, for those that
        share its drafter."""
        drafted = [copy.drafting for copy in engine.copies if copy.drafting]
        sharing = Counter((drafting.drafter, drafting.coupled) for drafting in drafted)
        return {
            drafting: self.latency.draft_s(
                drafting.drafter,
                min(self.max_num_seqs, sharing[drafting.drafter, drafting.coupled]),
                drafting.window if drafting.coupled else 1,
            )
            for drafting in set(drafted)
        }

    def _step_s(self, engine: EngineState, costs_s: Mapping[DraftSetting, float]) -> float:
        """Seconds of a step that verifies what comes during one."""
        num = len(engine.copies)
        batch = min(num, self.max_num_seqs)
        context = engine.context_tokens * batch / num
        alike = Counter((copy.drafting, copy.acceptance) for copy in engine.copies if copy.drafting)

        def num_verified(seconds: float) -> float:
            return (
                sum(
                    times * _verified(drafting, acceptance, costs_s[drafting], seconds)
                    for (drafting, acceptance), times in alike.items()
                )
                / num
            )

        most = sum(times * drafting.window for (drafting, _), times in alike.items()) / num
        verify_s = partial(step_s, self.latency, engine.tp_degree, batch, context)
        return settled_s(num_verified, verify_s, most)


@dataclass(frozen=True, eq=False)
class StepState:
    """All engines that are at this phase. Requests by row."""

    forecaster: Forecaster
    rows: Mapping[RequestId, int]
    engines: Mapping[int, EngineState]
    times_s: Mapping[int, Times]
    """When each copy would end, by engine."""
    ends_s: Times
    """When each request ends."""
    holders: Mapping[int, tuple[int, ...]]
    """The engines that have each request."""

    @classmethod
    def of(
        cls, forecaster: Forecaster, rows: Mapping[RequestId, int], engines: Iterable[EngineState]
    ) -> "StepState":
        by_index = {engine.engine: engine for engine in engines}
        times_s = {index: forecaster.times_s(engine) for index, engine in by_index.items()}
        holders: dict[int, tuple[int, ...]] = {}
        for index, of_engine in times_s.items():
            for row in of_engine:
                holders[row] = (*holders.get(row, ()), index)
        return cls(forecaster, rows, by_index, times_s, first_s(times_s.values()), holders)

    @cached_property
    def ranked(self) -> list[tuple[float, int]]:
        """Ends of all requests, the last one first."""
        return sorted(((end_s, row) for row, end_s in self.ends_s.items()), reverse=True)

    @property
    def end_s(self) -> float:
        """End of the step."""
        return self.ranked[0][0] if self.ranked else 0.0

    def engine_end_s(self, index: int) -> float:
        """When the engine has nothing left: losers of a race leave with the winner."""
        return max((self.ends_s[row] for row in self.times_s[index]), default=0.0)


def first_s(times_s: Iterable[Times]) -> Times:
    """The end of each request: the first of its copies' ends."""
    ends_s: Times = {}
    for of_engine in times_s:
        for row, end_s in of_engine.items():
            if end_s < ends_s.get(row, math.inf):
                ends_s[row] = end_s
    return ends_s


def merge(states: Sequence[EngineState]) -> list[PlacedRequest]:
    """Their requests; of several copies the one that has most."""
    most: dict[int, PlacedRequest] = {}
    for engine in states:
        for copy in engine.copies:
            known = most.get(copy.row)
            if known is None or copy.context_tokens > known.context_tokens:
                most[copy.row] = copy
    return list(most.values())


def _going(copy: PlacedRequest, draft_s: float, step_s: float) -> _Going:
    drafting, context, remaining = copy.drafting, copy.context_tokens, copy.remaining_tokens
    if drafting is None:
        return _Going(context, remaining, copy=copy)
    if drafting.coupled:
        rate = _coupled_tokens(drafting.window, copy.acceptance)
        return _Going(context, remaining, rate, drafting.window, draft_s, copy=copy)
    step = paced_step(drafting.window, copy.acceptance, _pace(step_s, draft_s))
    return _Going(context, remaining, step.tokens, step.num_verified, copy=copy)


def _verified(drafting: DraftSetting, acceptance: float, draft_s: float, step_s: float) -> float:
    """Draft tokens that a step of so many seconds verifies."""
    if drafting.coupled:
        return drafting.window
    return paced_step(drafting.window, acceptance, _pace(step_s, draft_s)).num_verified


def _pace(step_s: float, draft_s: float) -> float:
    """Tokens drafted in a step."""
    return step_s / draft_s if draft_s else math.inf
