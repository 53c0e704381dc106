"""Predict the time of a decode step whose requests draft in different ways. Pure.

A step verifies the drafts of all requests at once (SpecActor 4.1: requests of different windows in
one batch). Drafting in turn comes before the step. Drafting ahead runs during the step before, and
the step verifies the drafts that have arrived:

    step = draft_s(in turn) + verify_s(all)

So one request that is drafted for in turn makes the whole batch wait. If windows differ, the
formula uses their mean, linear between whole windows. Several drafters draft one after the other
before a step, but side by side during a step.

The pace is the number of draft tokens per request that arrive during a step. It decides how many
tokens a step yields of a request that is drafted for ahead (`engines.latency.expectation`). The
paper's max(w D, V) is not needed, because a step never waits for a whole window. The pace changes
the step's time, and the time changes the pace: `set_paces` is repeated until neither changes. Paces
are rounded, so that they change rarely.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from refrain.engines.latency.forecast import step_s
from refrain.engines.latency.interface import Latency
from refrain.engines.simulate.member import PARTS, DrafterPace, SimulatedRequest
from refrain.schemas.rollout import DraftSetting


class StepCosts:
    """Counts of a batch's members, updated as they join and leave.

    So the cost of a query does not depend on the batch size.
    """

    def __init__(self, tp_degree: int, latency: Latency) -> None:
        self._tp_degree = tp_degree
        self._latency = latency
        self._batch = 0
        self._drafts = 0
        """Draft tokens that a step verifies, in parts of a token (`PARTS`)."""
        self._settings = Counter[DraftSetting | None]()
        """Number of members by draft setting."""
        self._coupled = Counter[str]()
        """Number of members that are drafted for in turn, by drafter."""
        self._before = Counter[str]()
        """Draft tokens of these members by drafter, in parts of a token."""
        self.paces: Mapping[str, DrafterPace] = {}
        """Pace of each drafter that drafts ahead."""

    def add(self, member: SimulatedRequest) -> None:
        self._count(member, 1)

    def remove(self, member: SimulatedRequest) -> None:
        """Remove a request. Its setting and passes must be those with which it was added."""
        self._count(member, -1)

    @property
    def drafter(self) -> str:
        """Drafter of the most common setting; empty if most requests do not draft."""
        setting = max(self._settings, key=self._settings.__getitem__, default=None)
        return setting.drafter if setting else ""

    def step_s(self) -> Callable[[float], float]:
        """Return a function from the members' context tokens to the seconds of a step."""
        before_s, window = self._before_s(), self._drafts / PARTS / self._batch
        verify_s = partial(step_s, self._latency, self._tp_degree, self._batch, window=window)
        return lambda context: before_s + verify_s(context)

    def set_paces(self, context_tokens: float) -> bool:
        """Set each drafter's pace for this batch. Return whether a pace has changed."""
        ahead = Counter[str]()
        for setting, num in self._settings.items():
            if setting and not setting.coupled:
                ahead[setting.drafter] += num
        if not ahead:
            return False
        step_s = self.step_s()(context_tokens)
        paces = {
            drafter: self._pace(drafter, step_s, self._latency.draft_s(drafter, num, 1))
            for drafter, num in ahead.items()
        }
        changed = any(pace != self.paces.get(drafter) for drafter, pace in paces.items())
        self.paces = {**self.paces, **paces}
        return changed

    def _pace(self, drafter: str, step_s: float, draft_s: float) -> DrafterPace:
        before = self.paces.get(drafter)
        num_drafts = _rounded(step_s, draft_s, before.num_drafts if before else None)
        return DrafterPace(num_drafts, alone=self._batch == 1)

    def _before_s(self) -> float:
        """Return the seconds of drafting before a step."""
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


def _rounded(step_s: float, draft_s: float, before: float | None) -> float:
    """Return the tokens drafted in a step, rounded.

    The unit is 1/16 below 1, 1/8 from 1 to 2, 1/4 from 2 to 4, and so on. If the pace differs from
    `before` by less than a unit, return `before`.
    """
    if not draft_s:
        return math.inf
    pace = step_s / draft_s
    unit = _finest(pace)
    if before is not None and abs(pace - before) < unit:
        return before
    return unit * round(pace / unit)


def _finest(pace: float) -> float:
    """Return the rounding unit: the largest power of 2 up to pace / 8, and at least 1/16."""
    return max(1 / 16, 2.0 ** math.floor(math.log2(pace) - 3))
