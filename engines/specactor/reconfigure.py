"""Adapts each request's window to its acceptance (SpecActor, Algorithm 2). Pure.

    every 1000 tokens of a request, by its own p, at its engine's batch and context:
        (w, TGS) = argmax_w TGS of the request's drafter     ──► if it pays
        no draft of this drafter                             ──► if no window pays

p is the probability that a token is accepted, since the request got its present setting
(`ladder.request_acceptance`). A TGS is that of a batch whose requests are all like this one
(`Ladder.pace`).

Deviations:
- The paper also chooses whether drafter and verifier take turns. A verifier of refrain never waits
  for a draft model, so a draft model always drafts ahead.
- Every request gets a turn, not only those with p below the mean. A request with a high p gains
  from a longer window. A request with a p below its engine's mean is treated as having the mean.
  Other requests end before it, and the few extra tokens that it verifies cost nothing in their
  batch. A window that suits its own p would make the last responses end later.
- Batch and context, and so the drafter's pace, are the engine's at that moment. The paper has
  b = 1: there verifying more costs nothing, so the longest window would win.
- Each request's 1000 tokens count from its own last turn, not from the rollout's.
- If no window pays, the request is left to the history drafter, which drafts only what pays. Its
  acceptance is then the last one known. It returns to its drafter when a window pays again, for
  example in a smaller batch.
- Among windows that are nearly as fast, the shortest wins, because the rest of the batch pays for
  verification. A gain below `LEAST_GAIN` changes nothing.
- Acceptances are rounded to two digits, and batches and contexts to about a tenth, so that most
  lookups hit the cache.
"""

import math
from functools import cache
from statistics import fmean

from refrain.engines.rollout.moves import EngineView, Redraft, RolloutView
from refrain.engines.specactor.ladder import Ladder, request_acceptance
from refrain.schemas.drafting import HISTORY
from refrain.schemas.rollout import DraftSetting, RequestId

LEAST_GAIN = 1.02
"""Speed of another setting, relative to the present one, from which a change is worth it."""
NO_DRAFTS = DraftSetting(HISTORY, 1)
"""Setting of a request that is left to the history drafter, which chooses its own windows."""
_STEP = math.log(1.1)
"""Logarithm of the factor between two neighbouring batches or contexts after rounding."""

Measured = tuple[DraftSetting | None, str, float]
"""How a request is drafted for, the draft model that it has or last had, and its acceptance."""


class Reconfiguration:
    """The policy of one generation stage. It remembers each request's next turn, and skips engines
    that have not changed."""

    def __init__(
        self, ladder: Ladder, *, every_tokens: int = 1000, prompt_tokens: float = 0.0
    ) -> None:
        """`prompt_tokens`: mean prompt length of the stage. Engines report only the response
        tokens, so it is added to the context."""
        self._every_tokens = every_tokens
        self._prompt_tokens = prompt_tokens
        self._turns: dict[int, dict[RequestId, float]] = {}
        """Response tokens at which a request on an engine gets its next turn."""
        self._left: dict[RequestId, tuple[str, float]] = {}
        """Requests that are left to the history drafter: their drafter and acceptance before."""
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
        return [id for id in reached if self._measured(engine, id)]

    def _measured(self, engine: EngineView, id: RequestId) -> Measured | None:
        """Return how a request drafts. None while nothing is known about it."""
        told = engine.drafting.get(id)
        setting = told.setting if told else None
        if id in self._left and (setting is None or setting.drafter == HISTORY):
            return None, *self._left[id]
        acceptance = request_acceptance(told)
        if setting is None or acceptance is None:
            return None
        return setting, setting.drafter, acceptance

    def _take_turns(self, engine: EngineView, ids: list[RequestId]) -> list[Redraft]:
        batch = len(engine.progress)
        context = self._prompt_tokens + sum(engine.progress.values()) / batch
        at = near(batch), near(context)
        mean = self._mean(engine)
        moves = []
        for id in ids:
            self._turns[engine.engine][id] = engine.progress[id] + self._every_tokens
            measured = self._measured(engine, id)
            assert measured
            present, drafter, acceptance = measured
            setting = self._choose(present, drafter, max(acceptance, mean), *at)
            if setting == present:
                continue
            self._left.pop(id, None)
            if setting is None:
                self._left[id] = drafter, acceptance
            moves.append(Redraft(id, engine.engine, setting or NO_DRAFTS))
        return moves

    def _mean(self, engine: EngineView) -> float:
        """Return the mean acceptance of the engine's requests, or 0 if none has any drafts."""
        rates = map(request_acceptance, engine.drafting.values())
        known = [rate for rate in rates if rate is not None]
        return round(fmean(known), 2) if known else 0.0

    def _choose(
        self,
        present: DraftSetting | None,
        drafter: str,
        acceptance: float,
        batch: int,
        context: int,
    ) -> DraftSetting | None:
        """Return the best setting of the drafter, or None, if that is worth a change."""
        at = acceptance, batch, context
        best = self._best(drafter, *at)
        speeds = {setting: self._pace(setting, *at).tokens_per_s for setting in (None, best)}
        found = max(speeds, key=speeds.__getitem__)
        before = self._pace(present, *at).tokens_per_s
        return found if speeds[found] >= LEAST_GAIN * before else present


def near(number: float) -> int:
    """Round to one of a few whole numbers, evenly spaced in logarithms."""
    return round(math.exp(_STEP * round(math.log(max(1.0, number)) / _STEP)))
