"""The predicted state of a generation stage: where each request is, and when it ends. Pure.

    RolloutView ─outlook─► StepState ─ engine by engine ─forecast─► when each request ends

A raced request ends with the first of its copies. The step ends with its last request. Times are
seconds from the moment of the view.

Deviations: a copy that has lost its race stays in its engine's batch until its own end. The pace of
a decoupled drafter, and how its drafts slow a step, are those of the present batch.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Self

import numpy as np

from refrain.engines.latency.drafting_pace import Drafted, Pace, batch_paces, draft_s
from refrain.engines.latency.forecast import BatchForecast, forecast, step_s
from refrain.engines.latency.interface import Bounded, Latency
from refrain.schemas.rollout import DraftSetting, RequestId

Times = dict[int, float]
"""Seconds until the end, by request row."""


class PlacedRequest(NamedTuple):
    """A request on one engine."""

    row: int
    """The request's number, the same on every engine. Lookups by number are faster than by `id`."""
    id: RequestId
    context_tokens: float
    """Prompt and response tokens so far."""
    remaining_tokens: float
    """Expected response tokens to come, above 0."""
    drafting: DraftSetting | None = None
    """None: no drafts."""
    acceptance: float = 0.0
    """Probability that a draft token is accepted."""
    context_per_token: float = 1.0
    """Tokens by which the context grows for each response token."""

    @property
    def context_at_end(self) -> float:
        """Context tokens that it should have in the end."""
        return self.context_tokens + self.context_per_token * self.remaining_tokens

    def advanced(self, tokens: float) -> Self:
        """Return the request with so many more response tokens."""
        context = self.context_tokens + self.context_per_token * tokens
        return self._replace(
            context_tokens=context, remaining_tokens=self.remaining_tokens - tokens
        )


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine with its requests."""

    engine: int
    tp_degree: int
    copies: tuple[PlacedRequest, ...]

    @property
    def context_tokens(self) -> float:
        return sum(copy.context_tokens for copy in self.copies)


@dataclass(frozen=True, slots=True)
class EngineForecast:
    """The predicted course of one engine."""

    engine: EngineState
    _batch: BatchForecast | None
    """None: the engine has no requests."""
    _later: dict[float, EngineState] = field(default_factory=dict, compare=False)
    """Cache of later states, by seconds from now. Several switches start from the same one."""

    @property
    def end_s(self) -> float:
        """Seconds until the engine runs out of requests."""
        return self._batch.finish_s if self._batch else 0.0

    @property
    def times_s(self) -> Times:
        """Seconds until each request ends, by row."""
        if self._batch is None:
            return {}
        ends_s, copies = self._batch.ends_s.tolist(), self.engine.copies
        return {copies[i].row: end_s for i, end_s in zip(self._batch.order, ends_s, strict=True)}

    def later(self, wait_s: float) -> EngineState:
        """Return the predicted engine, `wait_s` from now."""
        engine, batch = self.engine, self._batch
        if batch is None:
            return engine
        if wait_s not in self._later:
            copies = tuple(batch.after(engine.copies, wait_s))
            self._later[wait_s] = replace(engine, copies=copies)
        return self._later[wait_s]


@dataclass(frozen=True)
class Forecaster:
    """Predictor of when the requests of an engine end."""

    latency: Latency
    max_num_seqs: int = 256
    """Most requests that an engine decodes at once."""

    def forecast(self, engine: EngineState) -> EngineForecast:
        return EngineForecast(engine, self._forecast(engine) if engine.copies else None)

    def knows(self, engine: EngineState) -> bool:
        """Return whether the latency model was measured for every step of the engine's forecast.
        Latency models that are not `Bounded` are known everywhere."""
        if not engine.copies or not isinstance(self.latency, Bounded):
            return True
        segments = self._forecast(engine).segments
        steps = [*zip(segments.batches.tolist(), segments.context_tokens.tolist(), strict=True)]
        # Segments hold means, so also check the longest request, alone at its end.
        steps.append((1, max(copy.context_at_end for copy in engine.copies)))
        return all(self.latency.reaches(engine.tp_degree, *step) for step in steps)

    def _forecast(self, engine: EngineState) -> BatchForecast:
        places: dict[Drafted, int] = {}
        place_of = [
            places.setdefault((copy.drafting, copy.acceptance), len(places))
            if copy.drafting
            else -1
            for copy in engine.copies
        ]
        counts = Counter(place_of)
        paces = self._paces(engine, {one: counts[place] for one, place in places.items()})
        # The last pace, index -1, is for copies without drafts.
        known = [*(of[:3] for of in paces.values()), (1.0, 0, 0.0)]
        fields = np.array(
            [
                (copy.context_tokens, copy.remaining_tokens, *known[place], copy.context_per_token)
                for copy, place in zip(engine.copies, place_of, strict=True)
            ]
        )
        return forecast(self.latency, engine.tp_degree, fields, max_num_seqs=self.max_num_seqs)

    def _paces(self, engine: EngineState, counts: Mapping[Drafted, int]) -> dict[Drafted, Pace]:
        """Return the pace of each way of drafting. `counts`: number of copies by way. All copies
        with the same drafter share its batch."""
        if not counts:
            return {}
        sharing: Counter[tuple[str, bool]] = Counter()
        for (setting, _), num in counts.items():
            sharing[setting.drafter, setting.coupled] += num

        def drafting_s(setting: DraftSetting) -> float:
            batch = min(self.max_num_seqs, sharing[setting.drafter, setting.coupled])
            return draft_s(self.latency, setting, batch)

        num = len(engine.copies)
        batch = min(num, self.max_num_seqs)
        context = engine.context_tokens * batch / num
        verify_s = partial(step_s, self.latency, engine.tp_degree, batch, context)
        return batch_paces(counts, num, drafting_s, verify_s)


@dataclass(frozen=True, eq=False)
class StepState:
    """All engines that are in this stage. Requests are named by row."""

    forecaster: Forecaster
    forecasts: Mapping[int, EngineForecast]
    """Forecast of each engine, by index."""
    ends_s: Times
    """Predicted end of each request."""

    @classmethod
    def of(cls, forecaster: Forecaster, engines: Iterable[EngineState]) -> "StepState":
        forecasts = {engine.engine: forecaster.forecast(engine) for engine in engines}
        ends_s = first_s(forecast.times_s for forecast in forecasts.values())
        return cls(forecaster, forecasts, ends_s)

    @property
    def end_s(self) -> float:
        """Seconds until the step ends."""
        return max(self.ends_s.values(), default=0.0)

    def engine_end_s(self, index: int) -> float:
        """Return when the engine runs out of requests. A race's losers stop with its winner."""
        copies = self.forecasts[index].engine.copies
        return max((self.ends_s[copy.row] for copy in copies), default=0.0)


def first_s(times_s: Iterable[Times]) -> Times:
    """Return the end of each request: the first end of its copies."""
    ends_s: Times = {}
    for of_engine in times_s:
        for row, end_s in of_engine.items():
            if end_s < ends_s.get(row, math.inf):
                ends_s[row] = end_s
    return ends_s


def merge(states: Sequence[EngineState]) -> list[PlacedRequest]:
    """Return all requests. Of several copies, return the one with most tokens."""
    most: dict[int, PlacedRequest] = {}
    for engine in states:
        for copy in engine.copies:
            known = most.get(copy.row)
            if known is None or copy.context_tokens > known.context_tokens:
                most[copy.row] = copy
    return list(most.values())
