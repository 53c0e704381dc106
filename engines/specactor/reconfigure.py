"""Window and mode of requests that are misguessed (SpecActor, Algorithm 2). Pure.

    every 1000 tokens of a request whose acceptance is below the mean:
        coupled   (w_c, TGS_c) ◄─ argmax_w TGS of taking turns,     its own p, b = 1 ┐
        decoupled (w_d, TGS_d) ◄─ argmax_w TGS of the plan's layout, its own p, b = 1 ┴► the better

p is the probability that a token is accepted since the request has its present setting
(`ladder.request_acceptance`). The mean is over all requests that are drafted for, copies included.

Deviations:
- Each request's 1000 tokens count from its own last turn, not the rollout's.
- A plan without drafter GPUs cannot decouple: only the window is chosen.
- Of equal speeds, coupled: it wastes nothing. "Do not draft" is no answer, since a move has a
  window of at least 1; at b = 1 that is the least of costs.
- Acceptances are rounded to hundredths, so that they are looked up as a rule.
"""

from dataclasses import dataclass

from engines.rollout.moves import EngineView, Redraft, RolloutView
from engines.specactor.expectation import coupled_tokens_per_s, streamed_tokens_per_s
from engines.specactor.ladder import Ladder, request_acceptance
from schemas.rollout import DraftSetting, RequestId


@dataclass(frozen=True, slots=True)
class RequestModel:
    """Tokens per second of one request alone."""

    ladder: Ladder
    coupled: bool
    """Drafters have no GPUs of their own, so that only the window is chosen."""

    def best_setting(self, drafter: str, acceptance: float) -> DraftSetting:
        """The fastest window and mode; of equal ones coupled, then the smaller window."""
        modes = (True,) if self.coupled else (True, False)
        settings = [
            DraftSetting(drafter, window, coupled)
            for coupled in modes
            for window in range(1, self.ladder.max_window + 1)
        ]
        return max(settings, key=lambda setting: self.tokens_per_s(setting, acceptance))

    def tokens_per_s(self, setting: DraftSetting, acceptance: float) -> float:
        """Tokens per second of one request (TGS at b = 1)."""
        ladder, window = self.ladder, setting.window
        draft_s = ladder.latency.draft_s(setting.drafter, 1, window)
        verify_s = ladder.latency.verify_s(ladder.tp_degree, 1, ladder.context_tokens_each, window)
        if setting.coupled:
            return coupled_tokens_per_s(window, acceptance, draft_s, verify_s)
        return streamed_tokens_per_s(window, acceptance, draft_s / window, verify_s)


@dataclass(frozen=True, slots=True)
class _Level:
    """Acceptance on one engine, as of a view of it."""

    view: EngineView
    total: float
    num_requests: int


class Reconfiguration:
    """Decides for one generation stage. Remembers when the next turn of each request is; engines
    that have not changed are not looked at again."""

    def __init__(self, model: RequestModel, *, every_tokens: int = 1000) -> None:
        self._model, self._every_tokens = model, every_tokens
        self._turns: dict[int, dict[RequestId, int]] = {}
        """Response tokens at which a request on an engine has its next turn."""
        self._seen: dict[int, EngineView] = {}
        self._levels: dict[int, _Level] = {}
        self._choices: dict[tuple[str, float], DraftSetting] = {}

    def decide(self, view: RolloutView) -> list[Redraft]:
        changed = [e for e in view.engines if self._seen.get(e.engine) is not e]
        due = [(engine, id) for engine in changed for id in self._due(engine)]
        mean = self._mean(view) if due else 0.0
        moves = (self._take_turn(engine, id, mean) for engine, id in due)
        return [move for move in moves if move]

    def _due(self, engine: EngineView) -> list[RequestId]:
        """Requests whose turn it is and whose acceptance is known."""
        self._seen[engine.engine] = engine
        before, progress = self._turns.get(engine.engine, {}), engine.progress
        turns = {id: before.get(id, num + self._every_tokens) for id, num in progress.items()}
        self._turns[engine.engine] = turns
        reached = (id for id, turn in turns.items() if progress[id] >= turn)
        return [id for id in reached if request_acceptance(engine.drafting.get(id)) is not None]

    def _take_turn(self, engine: EngineView, id: RequestId, mean: float) -> Redraft | None:
        self._turns[engine.engine][id] = engine.progress[id] + self._every_tokens
        present, acceptance = engine.drafting[id].setting, request_acceptance(engine.drafting[id])
        if present is None or acceptance is None or acceptance >= mean:
            return None
        setting = self._choose(present.drafter, acceptance)
        return Redraft(id, engine.engine, setting) if setting != present else None

    def _choose(self, drafter: str, acceptance: float) -> DraftSetting:
        key = drafter, round(acceptance, 2)
        if key not in self._choices:
            self._choices[key] = self._model.best_setting(*key)
        return self._choices[key]

    def _mean(self, view: RolloutView) -> float:
        levels = [self._level(engine) for engine in view.engines]
        return sum(at.total for at in levels) / sum(at.num_requests for at in levels)

    def _level(self, engine: EngineView) -> _Level:
        known = self._levels.get(engine.engine)
        if known is None or known.view is not engine:
            rates = [request_acceptance(engine.drafting.get(id)) for id in engine.progress]
            given = [rate for rate in rates if rate is not None]
            known = self._levels[engine.engine] = _Level(engine, sum(given), len(given))
        return known
