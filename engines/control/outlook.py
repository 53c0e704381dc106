"""What a view says about how a rollout phase will go on. Pure.

    progress ──remaining lengths──► tokens to come ─┐
    drafting ──acceptances────────► pace ───────────┴─► StepState

A request that has just come to an engine is there with no tokens until that engine tells: what it
was once seen with counts. Of one of which nothing was verified, the acceptance is the mean of what
its drafter has elsewhere in the view, or what was expected of it beforehand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from engines.control.state import Copy, EngineState, Forecaster, StepState
from engines.pat.remaining import Remaining
from engines.rollout.moves import EngineView, RolloutView
from engines.specactor.ladder import request_acceptance
from schemas.rollout import RequestId


@dataclass
class Outlook:
    """Of one rollout phase."""

    forecaster: Forecaster
    remaining: Remaining
    prompt_tokens: Mapping[str, int]
    """By prompt."""
    expected_acceptance: Mapping[str, float] = field(default_factory=dict)
    """By drafter, where nothing was verified yet; of the others nothing is accepted."""
    acceptances: Mapping[str, float] = field(default_factory=dict)
    """By drafter, as of the last view."""
    _seen: dict[RequestId, int] = field(default_factory=dict)
    """Most response tokens that a request was seen with."""

    def read(self, view: RolloutView) -> StepState:
        generated = self._generated(view)
        to_come = self.remaining.tokens(generated)
        lengths = {id: num + to_come[id] for id, num in generated.items()}
        known = {engine.engine: _acceptances(engine) for engine in view.engines}
        self.acceptances = {**self.expected_acceptance, **_means(view, known)}
        rows = {id: row for row, id in enumerate(generated)}
        engines = (
            self._engine(engine, rows, generated, lengths, known[engine.engine])
            for engine in view.engines
        )
        return StepState.of(self.forecaster, rows, engines)

    def _generated(self, view: RolloutView) -> dict[RequestId, int]:
        """Tokens of every unfinished request."""
        generated: dict[RequestId, int] = {}
        for engine in view.engines:
            for id, num in engine.progress.items():
                generated[id] = max(num, generated.get(id, 0), self._seen.get(id, 0))
        self._seen = generated
        return generated

    def _engine(
        self,
        engine: EngineView,
        rows: Mapping[RequestId, int],
        generated: Mapping[RequestId, int],
        lengths: Mapping[RequestId, float],
        known: Mapping[RequestId, float],
    ) -> EngineState:
        copies = []
        for id, told in engine.progress.items():
            drafting = engine.drafting[id].setting if id in engine.drafting else None
            mean = self.acceptances.get(drafting.drafter, 0.0) if drafting else 0.0
            num = told or generated[id]
            copies.append(
                Copy(
                    rows[id],
                    id,
                    self.prompt_tokens[id.prompt_key] + num,
                    lengths[id] - num,
                    drafting,
                    known.get(id, mean),
                )
            )
        return EngineState(engine.engine, engine.tp_degree, tuple(copies))


def _acceptances(engine: EngineView) -> dict[RequestId, float]:
    """Of its requests of which something was verified."""
    rates = ((id, request_acceptance(engine.drafting.get(id))) for id in engine.progress)
    return {id: rate for id, rate in rates if rate is not None}


def _means(view: RolloutView, known: Mapping[int, Mapping[RequestId, float]]) -> dict[str, float]:
    """Of each drafter, over what it drafts for."""
    by_drafter: dict[str, list[float]] = {}
    for engine in view.engines:
        for id, acceptance in known[engine.engine].items():
            setting = engine.drafting[id].setting
            assert setting is not None
            by_drafter.setdefault(setting.drafter, []).append(acceptance)
    return {drafter: fmean(values) for drafter, values in by_drafter.items()}
