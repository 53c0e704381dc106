"""Adapts each request's window and mode to its acceptance (SpecActor, Algorithm 2). Pure.

    every 1000 tokens of a request, by its own p, at its engine's batch and context:
        coupled   (w_c, TGS_c) ◄─ argmax_w TGS of taking turns      ┐
        decoupled (w_d, TGS_d) ◄─ argmax_w TGS of drafting ahead    ┴► the better one, if it pays

p is the probability that a token is accepted, since the request got its present setting
(`ladder.request_acceptance`). A TGS is that of a batch whose requests are all like this one.

Deviations:
- Every request gets a turn, not only those with p below the mean. A request with a high p gains
  from a longer window. A request with a p below its engine's mean is treated as having the mean.
  Other requests end before it, and the few extra tokens that it verifies cost nothing in their
  batch. A window that suits its own p would make the last responses end later.
- Batch and context, and so the drafter's pace, are the engine's at that moment. The paper has
  b = 1: there verifying more costs nothing, so the longest window would win.
- The mode belongs to the engine, because one coupled request makes all wait. It is the mode of most
  requests, unless the other mode is worth a change for the mean p.
- Each request's 1000 tokens count from its own last turn, not from the rollout's.
- A plan without drafter GPUs cannot decouple, so only the window is chosen.
- Among windows that are nearly as fast, the shortest wins, because the rest of the batch pays for
  verification. A gain below `LEAST_GAIN` changes nothing. "Do not draft" is no option, because a
  move has a window of at least 1.
- Acceptances are rounded to two digits, and batches and contexts to about a tenth, so that most
  lookups hit the cache.
"""

import math
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean

from engines.latency.forecast import step_s
from engines.rollout.moves import EngineView, Redraft, RolloutView
from engines.specactor.expectation import SettledStep, coupled_tokens_per_s, settled_step
from engines.specactor.ladder import Ladder, request_acceptance
from schemas.rollout import DraftSetting, RequestId

NEAR = 0.01
"""Share by which the chosen setting may be slower than the fastest."""
LEAST_GAIN = 1.02
"""Speed of another setting, relative to the present one, from which a change is worth it."""
_STEP = math.log(1.1)
"""Logarithm of the factor between two neighbouring batches or contexts after rounding."""


@dataclass(frozen=True, slots=True)
class RequestModel:
    """Tokens per second of one request, in a batch of requests like it."""

    ladder: Ladder
    coupled: bool
    """Whether drafters have no GPUs of their own. Then only the window is chosen."""

    def best_setting(
        self,
        drafter: str,
        acceptance: float,
        batch: int = 1,
        context_tokens_each: float | None = None,
        *,
        coupled: bool | None = None,
    ) -> DraftSetting:
        """Return the shortest window that is nearly the fastest (`NEAR`), coupled if one such is.

        `context_tokens_each`: mean context of a request. None: the ladder's. `coupled`: the mode.
        None: choose it.
        """
        at = acceptance, batch, context_tokens_each
        speeds: dict[DraftSetting, float] = {}
        if self.coupled or coupled is not False:
            in_turn = (DraftSetting(drafter, w) for w in range(1, self.ladder.max_window + 1))
            speeds |= {setting: self.tokens_per_s(setting, *at) for setting in in_turn}
        if not self.coupled and not coupled:
            speeds |= self._ahead(drafter, *at)
        enough = max(speeds.values()) / (1.0 + NEAR)
        return next(setting for setting, speed in speeds.items() if speed >= enough)

    def best_mode(
        self, drafter: str, acceptance: float, batch: int, context_tokens_each: float, present: bool
    ) -> bool:
        """Return whether to be coupled: as `present`, unless the other mode is worth a change."""
        at = acceptance, batch, context_tokens_each
        best = self.best_setting(drafter, *at)
        if self.coupled or best.coupled == present:
            return best.coupled
        kept = self.best_setting(drafter, *at, coupled=present)
        pays = self.tokens_per_s(best, *at) >= LEAST_GAIN * self.tokens_per_s(kept, *at)
        return best.coupled if pays else present

    def tokens_per_s(
        self,
        setting: DraftSetting,
        acceptance: float,
        batch: int = 1,
        context_tokens_each: float | None = None,
    ) -> float:
        """Return tokens per second of one request (TGS)."""
        if not setting.coupled:
            return self._settled(setting, acceptance, batch, context_tokens_each).tokens_per_s
        ladder, window = self.ladder, setting.window
        context_tokens = batch * self._context(context_tokens_each)
        draft_s = ladder.latency.draft_s(setting.drafter, batch, window)
        verify_s = ladder.latency.verify_s(ladder.tp_degree, batch, context_tokens, window)
        return coupled_tokens_per_s(window, acceptance, draft_s, verify_s)

    def _ahead(
        self, drafter: str, acceptance: float, batch: int, context: float | None
    ) -> dict[DraftSetting, float]:
        """Return the speed of each decoupled window, until a longer one changes nothing."""
        speeds: dict[DraftSetting, float] = {}
        before: SettledStep | None = None
        for window in range(1, self.ladder.max_window + 1):
            setting = DraftSetting(drafter, window, coupled=False)
            settled = self._settled(setting, acceptance, batch, context)
            if settled == before:
                break
            speeds[setting], before = settled.tokens_per_s, settled
        return speeds

    def _settled(
        self, setting: DraftSetting, acceptance: float, batch: int, context: float | None
    ) -> SettledStep:
        ladder, window = self.ladder, setting.window
        draft_s = ladder.latency.draft_s(setting.drafter, batch, window) / window
        context_tokens = batch * self._context(context)
        verify_s = partial(step_s, ladder.latency, ladder.tp_degree, batch, context_tokens)
        return settled_step(window, acceptance, draft_s, verify_s)

    def _context(self, each: float | None) -> float:
        return self.ladder.context_tokens_each if each is None else each


class Reconfiguration:
    """The policy of one generation stage. It remembers each request's next turn, and skips engines
    that have not changed."""

    def __init__(
        self, model: RequestModel, *, every_tokens: int = 1000, prompt_tokens: float = 0.0
    ) -> None:
        """`prompt_tokens`: mean prompt length of the stage. Engines report only the response
        tokens, so it is added to the context."""
        self._every_tokens = every_tokens
        self._prompt_tokens = prompt_tokens
        self._turns: dict[int, dict[RequestId, int]] = {}
        """Response tokens at which a request on an engine gets its next turn."""
        self._seen: dict[int, EngineView] = {}
        # Caches for the whole stage. Batches and contexts take few values.
        self._best = cache(model.best_setting)
        self._best_mode = cache(model.best_mode)
        self._tokens_per_s = cache(model.tokens_per_s)

    def decide(self, view: RolloutView) -> list[Redraft]:
        changed = [e for e in view.engines if self._seen.get(e.engine) is not e]
        due = [(engine, ids) for engine in changed if (ids := self._due(engine))]
        return [move for engine, ids in due for move in self._take_turns(engine, ids)]

    def _due(self, engine: EngineView) -> list[RequestId]:
        """Return the requests that are due and have a known acceptance."""
        self._seen[engine.engine] = engine
        before, progress = self._turns.get(engine.engine, {}), engine.progress
        turns = {id: before.get(id, num + self._every_tokens) for id, num in progress.items()}
        self._turns[engine.engine] = turns
        reached = (id for id, turn in turns.items() if progress[id] >= turn)
        return [id for id in reached if request_acceptance(engine.drafting.get(id)) is not None]

    def _take_turns(self, engine: EngineView, ids: list[RequestId]) -> list[Redraft]:
        batch = len(engine.progress)
        context = self._prompt_tokens + sum(engine.progress.values()) / batch
        at = near(batch), near(context)
        mean, mode = self._mean(engine), _mode(engine)
        moves = []
        for id in ids:
            self._turns[engine.engine][id] = engine.progress[id] + self._every_tokens
            told = engine.drafting[id]
            present, acceptance = told.setting, request_acceptance(told)
            assert present
            assert acceptance is not None
            acceptance = max(acceptance, mean)
            coupled = self._best_mode(present.drafter, mean, *at, mode)
            setting = self._choose(present, acceptance, coupled, *at)
            if setting != present:
                moves.append(Redraft(id, engine.engine, setting))
        return moves

    def _mean(self, engine: EngineView) -> float:
        rates = map(request_acceptance, engine.drafting.values())
        return round(fmean(rate for rate in rates if rate is not None), 2)

    def _choose(
        self, present: DraftSetting, acceptance: float, coupled: bool, batch: int, context: int
    ) -> DraftSetting:
        """Return the best setting of this mode if it is worth a change, or if the mode changes."""
        best = self._best(present.drafter, acceptance, batch, context, coupled=coupled)
        speed = self._tokens_per_s(best, acceptance, batch, context)
        before = self._tokens_per_s(present, acceptance, batch, context)
        pays = speed >= LEAST_GAIN * before or coupled != present.coupled
        return best if pays else present


def _mode(engine: EngineView) -> bool:
    """Return whether most of its requests are coupled."""
    settings = [told.setting for told in engine.drafting.values() if told.setting]
    return 2 * sum(setting.coupled for setting in settings) > len(settings)


def near(number: float) -> int:
    """Round to one of a few whole numbers, evenly spaced in logarithms."""
    return round(math.exp(_STEP * round(math.log(max(1.0, number)) / _STEP)))
