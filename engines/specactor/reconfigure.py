"""Window and mode of each request by how often its drafts are right (SpecActor, Algorithm 2). Pure.

    every 1000 tokens of a request, by its own p, in a batch and at a context like its engine's:
        coupled   (w_c, TGS_c) ◄─ argmax_w TGS of taking turns      ┐
        decoupled (w_d, TGS_d) ◄─ argmax_w TGS of drafting ahead    ┴► the better, where it pays

p is the probability that a token is accepted since the request has its present setting
(`ladder.request_acceptance`). A TGS is that of a batch whose requests are all like this one.

Deviations:
- Every request has its turn, not only those whose p is below the mean: one that is often right
  gains by a longer window. One that is right less often than the mean of its engine is taken to be
  as good as that: others end before it, and in their batch the few tokens more that it verifies
  cost it nothing, while a window that suits its own p would make the last responses end later.
- Batch and context, and with them the pace of the drafter, are the engine's at that moment, where
  the paper has b = 1: there to verify more costs nothing, so that the longest window is the best.
- The mode is the engine's, as one that takes turns keeps all waiting: that of most of its requests,
  unless the other is worth a change for the mean p.
- Each request's 1000 tokens count from its own last turn, not the rollout's.
- A plan without drafter GPUs cannot decouple: only the window is chosen.
- Of windows that are nearly as fast the shortest, as the others of the batch pay for what is
  verified; and no change for less than `LEAST_GAIN`. "Do not draft" is no answer, since a move has
  a window of at least 1.
- Acceptances are rounded to hundredths, batches and contexts to tenths of themselves, so that
  choices are looked up as a rule.
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
"""Share by which the setting that is taken may be slower than the fastest."""
LEAST_GAIN = 1.02
"""Speed over that of the present setting from which on another one is worth a change."""
_STEP = math.log(1.1)
"""Logarithm of the factor between batches, or contexts, that are told apart."""


@dataclass(frozen=True, slots=True)
class RequestModel:
    """Tokens per second of one request, in a batch of requests like it."""

    ladder: Ladder
    coupled: bool
    """Drafters have no GPUs of their own, so that only the window is chosen."""

    def best_setting(
        self,
        drafter: str,
        acceptance: float,
        batch: int = 1,
        context_tokens_each: float | None = None,
        *,
        coupled: bool | None = None,
    ) -> DraftSetting:
        """The shortest window that is nearly the fastest, coupled if one such is; `NEAR`.
        `context_tokens_each`: mean context of a request; None: the ladder's. `coupled`: the mode,
        where it is given."""
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
        """Whether to take turns: as at `present`, unless the other mode is worth a change."""
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
        """Tokens per second of one request (TGS)."""
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
        """Speeds of drafting ahead, by window, until a longer one changes nothing."""
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
    """Decides for one generation stage. Remembers when the next turn of each request is; engines
    that have not changed are not looked at again."""

    def __init__(
        self, model: RequestModel, *, every_tokens: int = 1000, prompt_tokens: float = 0.0
    ) -> None:
        """`prompt_tokens`: mean length of the stage's prompts, which is context beside what its
        engines tell of."""
        self._every_tokens = every_tokens
        self._prompt_tokens = prompt_tokens
        self._turns: dict[int, dict[RequestId, int]] = {}
        """Response tokens at which a request on an engine has its next turn."""
        self._seen: dict[int, EngineView] = {}
        # What was looked up lasts for the stage: batches and contexts are few.
        self._best = cache(model.best_setting)
        self._best_mode = cache(model.best_mode)
        self._tokens_per_s = cache(model.tokens_per_s)

    def decide(self, view: RolloutView) -> list[Redraft]:
        changed = [e for e in view.engines if self._seen.get(e.engine) is not e]
        due = [(engine, ids) for engine in changed if (ids := self._due(engine))]
        return [move for engine, ids in due for move in self._take_turns(engine, ids)]

    def _due(self, engine: EngineView) -> list[RequestId]:
        """Requests whose turn it is and whose acceptance is known."""
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
        """The best setting of this mode, where it is worth a change; the mode is not its own."""
        best = self._best(present.drafter, acceptance, batch, context, coupled=coupled)
        speed = self._tokens_per_s(best, acceptance, batch, context)
        before = self._tokens_per_s(present, acceptance, batch, context)
        pays = speed >= LEAST_GAIN * before or coupled != present.coupled
        return best if pays else present


def _mode(engine: EngineView) -> bool:
    """Whether most of its requests take turns."""
    settings = [told.setting for told in engine.drafting.values() if told.setting]
    return 2 * sum(setting.coupled for setting in settings) > len(settings)


def near(number: float) -> int:
    """A whole number near this one, of few; the logarithms of those are evenly spaced."""
    return round(math.exp(_STEP * round(math.log(max(1.0, number)) / _STEP)))
