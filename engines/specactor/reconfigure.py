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
from functools import cache
from statistics import fmean

from engines.rollout.moves import EngineView, Redraft, RolloutView
from engines.specactor.ladder import Ladder, request_acceptance
from schemas.rollout import DraftSetting, RequestId

LEAST_GAIN = 1.02
"""Speed of another setting, relative to the present one, from which a change is worth it."""
_STEP = math.log(1.1)
"""Logarithm of the factor between two neighbouring batches or contexts after rounding."""


class Reconfiguration:
    """The policy of one generation stage. It remembers each request's next turn, and skips engines
    that have not changed."""

    def __init__(
        self,
        ladder: Ladder,
        *,
        coupled: bool,
        every_tokens: int = 1000,
        prompt_tokens: float = 0.0,
    ) -> None:
        """`coupled`: drafters have no GPUs of their own, so only the window is chosen.
        `prompt_tokens`: mean prompt length of the stage. Engines report only the response tokens,
        so it is added to the context."""
        self._coupled = coupled
        self._every_tokens = every_tokens
        self._prompt_tokens = prompt_tokens
        self._turns: dict[int, dict[RequestId, float]] = {}
        """Response tokens at which a request on an engine gets its next turn."""
        self._seen: dict[int, EngineView] = {}
        # Caches for the whole stage. Batches and contexts take few values.
        self._best, self._pace = cache(ladder.best_setting), cache(ladder.pace)

    def decide(self, view: RolloutView) -> list[Redraft]:
        changed = [e for e in view.engines if self._seen.get(e.engine) is not e]
        due = [(engine, ids) for engine in changed if (ids := self._due(engine))]
        return [move for engine, ids in due for move in self._take_turns(engine, ids)]

    def _due(self, engine: EngineView) -> list[RequestId]:
        """Return the requests that are due and have a known acceptance."""
        self._seen[engine.engine] = engine
        before, progress = self._turns.get(engine.engine, {}), engine.progress
        # A conversation may begin anew, with fewer tokens than before.
        turns = {
            id: min(before.get(id, math.inf), num + self._every_tokens)
            for id, num in progress.items()
        }
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

    def _best_mode(
        self, drafter: str, acceptance: float, batch: int, context: int, present: bool
    ) -> bool:
        """Return whether to be coupled: as `present`, unless the other mode is worth a change."""
        at = acceptance, batch, context
        best = self._best(drafter, *at, coupled=self._coupled or None)
        if self._coupled or best.coupled == present:
            return best.coupled
        kept = self._best(drafter, *at, coupled=present)
        speed, before = (self._pace(setting, *at).tokens_per_s for setting in (best, kept))
        return best.coupled if speed >= LEAST_GAIN * before else present

    def _choose(
        self, present: DraftSetting, acceptance: float, coupled: bool, batch: int, context: int
    ) -> DraftSetting:
        """Return the best setting of this mode if it is worth a change, or if the mode changes."""
        at = acceptance, batch, context
        best = self._best(present.drafter, *at, coupled=coupled)
        speed, before = (self._pace(setting, *at).tokens_per_s for setting in (best, present))
        pays = speed >= LEAST_GAIN * before or coupled != present.coupled
        return best if pays else present


def _mode(engine: EngineView) -> bool:
    """Return whether most of its requests are coupled."""
    settings = [told.setting for told in engine.drafting.values() if told.setting]
    return 2 * sum(setting.coupled for setting in settings) > len(settings)


def near(number: float) -> int:
    """Round to one of a few whole numbers, evenly spaced in logarithms."""
    return round(math.exp(_STEP * round(math.log(max(1.0, number)) / _STEP)))
