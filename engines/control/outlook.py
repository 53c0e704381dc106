"""Forecast of a generation stage, from what a view shows. Pure.

    progress ──remaining lengths──► tokens to come ─┐
    drafting ──acceptances────────► pace ───────────┴─► StepState

A request that has just come to an engine shows zero tokens there until the engine reports. The
forecast then uses the tokens that the last view showed. Any other count holds, even a smaller one:
a conversation may begin anew.

A request's acceptance is the first of these that is known: its own, once enough draft tokens were
verified; its prompt's, for drafts from history; its drafter's mean in the view; its drafter's
expected acceptance.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from refrain.engines.control.state import EngineState, Forecaster, PlacedRequest, StepState
from refrain.engines.pat.remaining import Remaining
from refrain.engines.rollout.moves import EngineView, RolloutView
from refrain.engines.specactor.ladder import request_acceptance
from refrain.schemas.drafting import HISTORY
from refrain.schemas.rollout import DraftProgress, DraftSetting, RequestId

MIN_VERIFIED = 64
"""Draft tokens of a request that must be accepted or rejected before its own acceptance counts."""


@dataclass
class Outlook:
    """Forecasts of one generation stage, with a memory of earlier reports."""

    forecaster: Forecaster
    remaining: Remaining
    prompt_tokens: Mapping[str, int]
    """Prompt length in tokens, by prompt key."""
    expected_acceptance: Mapping[str, float] = field(default_factory=dict)
    """Acceptance by drafter before anything is verified. 0 for drafters that are missing."""
    prompt_acceptance: Mapping[str, float] = field(default_factory=dict)
    """Acceptance of drafts from history, by prompt. Empty if all prompts have the same."""
    acceptances: Mapping[str, float] = field(default_factory=dict)
    """Mean acceptance by drafter in the last view."""
    context_rates: Mapping[str, float] = field(default_factory=dict)
    """Tokens by which a context grows for each response token, by prompt. 1 if missing."""
    default_drafting: DraftSetting | None = None
    """Setting of requests that no engine has reported on yet."""
    _seen: RolloutView | None = None
    """The last view."""
    _generated: dict[RequestId, int] = field(default_factory=dict)
    """Response tokens of each request in the last view that knew them."""
    _settings: dict[RequestId, DraftSetting | None] = field(default_factory=dict)
    """Last reported setting of each request."""
    _rates: dict[tuple[RequestId, str], float] = field(default_factory=dict)
    """Last known acceptance, by request and drafter."""

    def forecast(self, view: RolloutView, scenario: float = 0.0) -> StepState:
        """Return the predicted state. `scenario`: see `Remaining.tokens`."""
        self._look(view)
        generated = self._generated
        to_come = self.remaining.tokens(generated, scenario)
        lengths = {id: num + to_come[id] for id, num in generated.items()}
        rows = {id: row for row, id in enumerate(generated)}
        engines = (self._engine(engine, rows, lengths) for engine in view.engines)
        return StepState.of(self.forecaster, engines)

    def _look(self, view: RolloutView) -> None:
        """Read the view. Several scenarios share one view, so read each view once."""
        if view is not self._seen:
            self._seen, self._generated = view, self._count(view)
            self._receive(view)
            self.acceptances = {**self.expected_acceptance, **_means(view)}

    def _count(self, view: RolloutView) -> dict[RequestId, int]:
        """Return the response tokens of every unfinished request."""
        generated: dict[RequestId, int] = {}
        for engine in view.engines:
            for id, num in engine.progress.items():
                generated[id] = max(num or self._generated.get(id, 0), generated.get(id, 0))
        return generated

    def _receive(self, view: RolloutView) -> None:
        for engine in view.engines:
            for id, told in engine.drafting.items():
                self._settings[id] = told.setting
                rate = _acceptance(told)
                if told.setting and rate is not None:
                    self._rates[id, told.setting.drafter] = rate

    def _engine(
        self, engine: EngineView, rows: Mapping[RequestId, int], lengths: Mapping[RequestId, float]
    ) -> EngineState:
        copies = []
        for id, num in engine.progress.items():
            so_far = num or self._generated[id]
            rate = self.context_rates.get(id.prompt_key, 1.0)
            context = self.prompt_tokens[id.prompt_key] + rate * so_far
            drafting = self._setting(engine, id)
            acceptance = self._acceptance(id, drafting.drafter) if drafting else 0.0
            at = context, lengths[id] - so_far, drafting, acceptance, rate
            copies.append(PlacedRequest(rows[id], id, *at))
        return EngineState(engine.engine, engine.tp_degree, tuple(copies))

    def _setting(self, engine: EngineView, id: RequestId) -> DraftSetting | None:
        told = engine.drafting.get(id)
        return told.setting if told else self._settings.get(id, self.default_drafting)

    def _acceptance(self, id: RequestId, drafter: str) -> float:
        known = self._rates.get((id, drafter))
        if known is None and drafter == HISTORY:
            known = self.prompt_acceptance.get(id.prompt_key)
        return self.acceptances.get(drafter, 0.0) if known is None else known


def _acceptance(told: DraftProgress) -> float | None:
    """Return the acceptance, or None if too little was verified."""
    if told.num_accepted_tokens + told.num_rejections < MIN_VERIFIED:
        return None
    return request_acceptance(told)


def _means(view: RolloutView) -> dict[str, float]:
    """Return each drafter's mean acceptance over the requests that it drafts for."""
    by_drafter: dict[str, list[float]] = {}
    for engine in view.engines:
        for told in engine.drafting.values():
            rate = _acceptance(told)
            if told.setting and rate is not None:
                by_drafter.setdefault(told.setting.drafter, []).append(rate)
    return {drafter: fmean(rates) for drafter, rates in by_drafter.items()}
