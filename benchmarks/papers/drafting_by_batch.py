"""Drafting chosen by the running batch, which SpecActor does not have. Pure."""

from dataclasses import dataclass, field

from engines.latency.interface import Latency
from engines.specactor.ladder import Ladder
from engines.specactor.reconfigure import near
from schemas.rollout import DraftSetting

MAX_BATCH_WINDOW = 6
"""Largest window of a setting chosen by the batch."""


@dataclass(frozen=True)
class SettingByBatch:
    """Setting that is the fastest for the running batch by the mean acceptance; None where drafting
    does not pay."""

    latency: Latency
    tp_degree: int
    drafter: str
    acceptance: float
    modes: tuple[bool, ...]
    """Values of `DraftSetting.coupled` that may be chosen."""
    _choices: dict[tuple[int, int], DraftSetting | None] = field(default_factory=dict, init=False)
    """Choices made, by batch and context."""

    def __call__(self, batch: int, context_tokens: float) -> DraftSetting | None:
        at = near(batch), near(context_tokens / batch)
        if at not in self._choices:
            self._choices[at] = self._choose(*at)
        return self._choices[at]

    def _choose(self, batch: int, context_tokens_each: int) -> DraftSetting | None:
        drafters = (self.drafter,)
        ladder = Ladder(
            self.latency, self.tp_degree, drafters, context_tokens_each, MAX_BATCH_WINDOW
        )
        only_coupled = self.modes == (True,) or None
        best = ladder.best_setting(self.drafter, self.acceptance, batch, coupled=only_coupled)
        decode_s = self.latency.decode_s(self.tp_degree, batch, batch * context_tokens_each)
        pays = ladder.pace(best, self.acceptance, batch).tokens_per_s * decode_s > 1.0
        return best if pays else None
