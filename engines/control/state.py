"""A rollout phase as it is expected to go on: who is where, and when each request will be there.

    RolloutView ─outlook─► StepState ─effects─► StepState as it would be after some moves
                               └─ engine by engine ─forecast─► when each request ends

A raced request ends with the first of its copies; the step ends with its last request. Times are
seconds from the moment of the view. Pure.

Deviations: a copy that has lost its race counts in its engine's batch until its own end. The pace
of a decoupled drafter is that of the batch as it is now.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from engines.latency.forecast import Unfinished, finish_times_s, step_s
from engines.latency.interface import Latency
from engines.latency.speedup import expected_tokens
from engines.specactor.expectation import StreamedStep, streamed_step
from schemas.rollout import DraftSetting, RequestId

MAX_SEGMENTS = 16
"""Of a forecast: half of what a single switch is decided with, as there are many to make."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A request on one engine."""

    id: RequestId
    context_tokens: float
    """Prompt and response so far."""
    remaining_tokens: float
    """Response tokens expected to come, above 0."""
    drafting: DraftSetting | None = None
    """None: not drafted for."""
    acceptance: float = 0.0
    """Probability that a draft token is accepted."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What one engine has to do."""

    engine: int
    tp_degree: int
    copies: tuple[Copy, ...]
    delay_s: float = 0.0
    """Until it decodes: it wakes, or computes keys and values first."""

    def find(self, id: RequestId) -> Copy | None:
        return next((copy for copy in self.copies if copy.id == id), None)

    @property
    def context_tokens(self) -> float:
        return sum(copy.context_tokens for copy in self.copies)


@dataclass(frozen=True)
class Forecaster:
    """When the requests of an engine end."""

    latency: Latency
    max_num_seqs: int = 256
    """Requests that one engine decodes at a time."""

    def times_s(self, engine: EngineState) -> dict[RequestId, float]:
        requests = self.unfinished(engine)
        times_s = finish_times_s(
            self.latency,
            engine.tp_degree,
            requests,
            max_num_seqs=self.max_num_seqs,
            max_segments=MAX_SEGMENTS,
        )
        until_s = (times_s + engine.delay_s).tolist()
        return {copy.id: end_s for copy, end_s in zip(engine.copies, until_s, strict=True)}

    def unfinished(self, engine: EngineState) -> list[Unfinished]:
        """How fast each goes on there."""
        if not any(copy.drafting for copy in engine.copies):
            return [Unfinished(c.context_tokens, c.remaining_tokens) for c in engine.copies]
        costs_s = self._draft_s(engine)
        step = self._step_s(engine)
        return [_unfinished(copy, costs_s.get(copy.drafting, 0.0), step) for copy in engine.copies]

    def _draft_s(self, engine: EngineState) -> dict[DraftSetting | None, float]:
        """Of a coupled setting all its window, of a decoupled one a token, for those that share
        its drafter."""
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

    def _step_s(self, engine: EngineState) -> float:
        batch = min(len(engine.copies), self.max_num_seqs)
        share = batch / len(engine.copies)
        windows = [copy.drafting.window if copy.drafting else 0 for copy in engine.copies]
        window = sum(windows) / len(windows)
        context = engine.context_tokens * share
        return step_s(self.latency, engine.tp_degree, batch, context, window)


@dataclass(frozen=True, eq=False)
class StepState:
    """All engines that are at this phase."""

    forecaster: Forecaster
    engines: Mapping[int, EngineState]
    _known: Mapping[int, Mapping[RequestId, float]] = field(default_factory=dict)
    """Forecasts of engines that are as they were."""

    @cached_property
    def times_s(self) -> dict[int, Mapping[RequestId, float]]:
        """When each copy would end, by engine."""
        return {
            index: self._known[index] if index in self._known else self.forecaster.times_s(engine)
            for index, engine in self.engines.items()
        }

    @cached_property
    def ends_s(self) -> dict[RequestId, float]:
        """When each request ends."""
        ends_s: dict[RequestId, float] = {}
        for times_s in self.times_s.values():
            for id, end_s in times_s.items():
                if end_s < ends_s.get(id, float("inf")):
                    ends_s[id] = end_s
        return ends_s

    @cached_property
    def ranked(self) -> list[tuple[float, RequestId]]:
        """Ends of all requests, the last one first."""
        ends = [(end_s, id) for id, end_s in self.ends_s.items()]
        return sorted(ends, key=lambda end: -end[0])

    @cached_property
    def holders(self) -> dict[RequestId, tuple[int, ...]]:
        """The engines that have each request."""
        holders: dict[RequestId, tuple[int, ...]] = {}
        for index, engine in self.engines.items():
            for copy in engine.copies:
                holders[copy.id] = (*holders.get(copy.id, ()), index)
        return holders

    @property
    def end_s(self) -> float:
        """Of the step."""
        return self.ranked[0][0] if self.ranked else 0.0

    def engine_end_s(self, index: int) -> float:
        """When the engine has nothing left: losers of a race leave with the winner."""
        return max((self.ends_s[copy.id] for copy in self.engines[index].copies), default=0.0)

    def after(self, changes: Mapping[int, EngineState | None]) -> "StepState":
        """With these engines as they would be; None: not at work any more."""
        engines = {i: e for i, e in self.engines.items() if i not in changes}
        known = {i: self.times_s[i] for i in engines}
        engines |= {i: e for i, e in changes.items() if e is not None}
        return StepState(self.forecaster, engines, known)


def best_copy(state: StepState, id: RequestId) -> tuple[int, Copy] | None:
    """(engine, copy) that has most of the request, as the coordinator takes it from there."""
    found = [
        (index, copy)
        for index in state.holders.get(id, ())
        if (copy := state.engines[index].find(id))
    ]
    return max(found, key=lambda at: at[1].context_tokens, default=None)


def _unfinished(copy: Copy, draft_s: float, step_s: float) -> Unfinished:
    drafting, context, remaining = copy.drafting, copy.context_tokens, copy.remaining_tokens
    if drafting is None:
        return Unfinished(context, remaining)
    if drafting.coupled:
        rate = _coupled_tokens(drafting.window, copy.acceptance)
        return Unfinished(context, remaining, rate, drafting.window, draft_s)
    pace = min(2 * drafting.window, step_s / draft_s) if draft_s else 2 * drafting.window
    step = _streamed(drafting.window, copy.acceptance, _rounded(pace))
    return Unfinished(context, remaining, step.tokens, round(step.num_verified))


def _rounded(pace: float) -> float:
    """Tokens drafted in a step, down to a quarter: there are few to look up."""
    return int(4 * pace) / 4


@lru_cache(1 << 14)
def _coupled_tokens(window: int, acceptance: float) -> float:
    return expected_tokens(window, acceptance)


@lru_cache(1 << 14)
def _streamed(window: int, acceptance: float, pace: float) -> StreamedStep:
    return streamed_step(window, acceptance, pace)


def merge(states: Sequence[EngineState]) -> list[Copy]:
    """Their requests; of several copies the one that has most."""
    most: dict[RequestId, Copy] = {}
    for engine in states:
        for copy in engine.copies:
            known = most.get(copy.id)
            if known is None or copy.context_tokens > known.context_tokens:
                most[copy.id] = copy
    return list(most.values())
