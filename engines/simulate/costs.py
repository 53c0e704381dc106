"""Time of a decode step of a batch whose requests are drafted for in several ways. Pure.

All are verified in one step. Coupled ones are drafted for before it; decoupled ones meanwhile, and
the step takes what has come (SpecActor 4.1, requests of different windows and modes in one batch):

    step = draft_s(coupled) + verify_s(all)

so one coupled request keeps its batch waiting. Where windows differ, verifying and drafting before
it cost what they would with the mean, linear between whole windows. Different drafters draft one
after the other before a step, and side by side meanwhile. How much comes meanwhile, the pace,
decides what a decoupled step yields (`engines.specactor.expectation`, streamed), so the paper's
max(w D, V) is not needed: a step waits for no window. What a step yields and verifies makes it
longer or shorter, and with it the pace, until neither changes. Paces are rounded, so that they
change seldom.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from engines.latency.forecast import step_s
from engines.latency.interface import Latency
from engines.simulate.member import PARTS, SimulatedRequest
from schemas.rollout import DraftSetting


class StepCosts:
    """Kept as members come and leave, so that asking costs the same in every batch."""

    def __init__(self, tp_degree: int, latency: Latency) -> None:
        self._tp_degree = tp_degree
        self._latency = latency
        self._batch = 0
        self._drafts = 0
        """Parts of draft tokens that a step verifies."""
        self._settings = Counter[DraftSetting | None]()
        """Members that are drafted for so."""
        self._coupled = Counter[str]()
        """Members that are drafted for before a step, by drafter."""
        self._before = Counter[str]()
        """Parts of their draft tokens."""
        self.paces: Mapping[str, float] = {}
        """Tokens that a drafter drafts for each decoupled request while a step goes on."""

    def add(self, member: SimulatedRequest) -> None:
        self._count(member, 1)

    def remove(self, member: SimulatedRequest) -> None:
        """Take a request away, as it was when it was added."""
        self._count(member, -1)

    @property
    def drafter(self) -> str:
        """Drafter of the commonest setting; empty where that is none."""
        setting = max(self._settings, key=self._settings.__getitem__, default=None)
        return setting.drafter if setting else ""

    def step_s(self) -> Callable[[float], float]:
        """Seconds of a step of these members, by their context tokens."""
        before_s, window = self._before_s(), self._drafts / PARTS / self._batch
        verify_s = partial(step_s, self._latency, self._tp_degree, self._batch, window=window)
        return lambda context: before_s + verify_s(context)

    def set_paces(self, context_tokens: float) -> bool:
        """Pace of each drafter in this batch; whether one has changed."""
        decoupled = Counter[str]()
        for setting, num in self._settings.items():
            if setting and not setting.coupled:
                decoupled[setting.drafter] += num
        if not decoupled:
            return False
        step_s = self.step_s()(context_tokens)
        paces = {
            drafter: _pace(step_s, self._latency.draft_s(drafter, num, 1), self.paces.get(drafter))
            for drafter, num in decoupled.items()
        }
        changed = any(pace != self.paces.get(drafter) for drafter, pace in paces.items())
        self.paces = {**self.paces, **paces}
        return changed

    def _before_s(self) -> float:
        """Drafting for those that are coupled."""
        seconds = 0.0
        for drafter, parts in self._before.items():
            if not parts:
                continue
            num = self._coupled[drafter]
            low, share = divmod(parts / PARTS / num, 1)
            low_s = self._latency.draft_s(drafter, num, int(low)) if low else 0.0
            high_s = self._latency.draft_s(drafter, num, int(low) + 1) if share else 0.0
            seconds += (1 - share) * low_s + share * high_s
        return seconds

    def _count(self, member: SimulatedRequest, sign: int) -> None:
        setting, parts = member.setting, sign * member.passes.window
        self._batch += sign
        self._drafts += parts
        self._settings[setting] += sign
        if not self._settings[setting]:
            del self._settings[setting]
        if setting and setting.coupled:
            self._coupled[setting.drafter] += sign
            self._before[setting.drafter] += parts


def _pace(step_s: float, draft_s: float, before: float | None) -> float:
    """Tokens drafted in a step, rounded: to a sixteenth below 1, an eighth below 2, and so on; the
    same as before as long as that is near."""
    if not draft_s:
        return math.inf
    pace = step_s / draft_s
    unit = _finest(pace)
    if before is not None and abs(pace - before) < unit:
        return before
    return unit * round(pace / unit)


def _finest(pace: float) -> float:
    """Largest power of 2 that is at most an eighth of this, and at least a sixteenth."""
    return max(1 / 16, 2.0 ** math.floor(math.log2(pace) - 3))
