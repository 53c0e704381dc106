"""What a decode step of a batch costs whose requests are drafted for in several ways. Pure.

All are verified in one step; coupled ones are drafted for before it, decoupled ones meanwhile
(SpecActor 4.1, with requests of different windows and modes in one batch):

    step = max(draft_s(coupled) + verify_s(all), draft_s(decoupled))

so one coupled request keeps its batch waiting. Where windows differ, verifying and drafting before
it cost what they would with the mean, linear between whole windows. Different drafters draft one
after the other before a step, and side by side meanwhile. A step does not wait for a decoupled
window to be whole: it takes what is there (`engines.specactor.expectation`, streamed), which is
modelled as a window cut to what can be drafted meanwhile, at least 1.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from engines.latency.interface import Latency
from engines.simulate.member import PARTS, Member
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
        self._before = Counter[str]()
        """Parts of draft tokens by drafter, of those that are drafted for before a step."""
        self.caps: Mapping[str, int] = {}
        """Largest decoupled window of each drafter."""

    def add(self, member: Member) -> None:
        self._count(member, 1)

    def remove(self, member: Member) -> None:
        """As it was when it was added."""
        self._count(member, -1)

    @property
    def drafter(self) -> str:
        """Of the commonest setting; empty where that is none."""
        setting = max(self._settings, key=self._settings.__getitem__, default=None)
        return setting.drafter if setting else ""

    def step_s(self) -> Callable[[float], float]:
        """Seconds of a step of these members, by their context tokens."""
        verify_s = self._verify_s(self._window)
        before_s, meanwhile_s = self._before_s(), self._meanwhile_s()
        if not before_s and not meanwhile_s:
            return verify_s
        return lambda context: max(before_s + verify_s(context), meanwhile_s)

    def cap(self, context_tokens: float) -> bool:
        """Set the caps as this batch is now; whether one is another."""
        decoupled = self._decoupled()
        if not decoupled:
            return False
        step_s = self._before_s() + self._verify_s(self._window)(context_tokens)
        caps = {
            drafter: _most(partial(self._latency.draft_s, drafter, num), step_s, window)
            for drafter, (num, window) in decoupled.items()
        }
        changed = any(caps[drafter] != self.caps.get(drafter) for drafter in caps)
        self.caps = {**self.caps, **caps}
        return changed

    @property
    def _window(self) -> float:
        """Mean draft tokens that a step verifies for each."""
        return self._drafts / PARTS / self._batch

    def _verify_s(self, window: float) -> Callable[[float], float]:
        """Verifying so many draft tokens of each, by context tokens."""
        low, share = int(window), window % 1
        low_s = self._whole_s(low)
        if not share:
            return low_s
        high_s = self._whole_s(low + 1)
        return lambda context: (1 - share) * low_s(context) + share * high_s(context)

    def _whole_s(self, window: int) -> Callable[[float], float]:
        if not window:
            return partial(self._latency.decode_s, self._tp_degree, self._batch)
        return partial(self._latency.verify_s, self._tp_degree, self._batch, window=window)

    def _before_s(self) -> float:
        """Drafting for those that are coupled."""
        seconds = 0.0
        for drafter, parts in self._before.items():
            if not parts:
                continue
            num = self._num_coupled(drafter)
            low, share = divmod(parts / PARTS / num, 1)
            low_s = self._latency.draft_s(drafter, num, int(low)) if low else 0.0
            high_s = self._latency.draft_s(drafter, num, int(low) + 1) if share else 0.0
            seconds += (1 - share) * low_s + share * high_s
        return seconds

    def _meanwhile_s(self) -> float:
        """Drafting for those that are decoupled."""
        times_s = [
            self._latency.draft_s(drafter, num, min(window, self.caps.get(drafter, window)))
            for drafter, (num, window) in self._decoupled().items()
        ]
        return max(times_s, default=0.0)

    def _decoupled(self) -> dict[str, tuple[int, int]]:
        """By drafter: for how many, and the largest window."""
        found: dict[str, tuple[int, int]] = {}
        for setting, num in self._settings.items():
            if setting and not setting.coupled:
                before, window = found.get(setting.drafter, (0, 0))
                found[setting.drafter] = before + num, max(window, setting.window)
        return found

    def _num_coupled(self, drafter: str) -> int:
        return sum(
            num
            for setting, num in self._settings.items()
            if setting and setting.coupled and setting.drafter == drafter
        )

    def _count(self, member: Member, sign: int) -> None:
        setting, parts = member.setting, sign * member.passes.window
        self._batch += sign
        self._drafts += parts
        self._settings[setting] += sign
        if not self._settings[setting]:
            del self._settings[setting]
        if setting and setting.coupled:
            self._before[setting.drafter] += parts


def _most(draft_s: Callable[[int], float], step_s: float, window: int) -> int:
    """The largest window up to this one that is drafted within a step; at least 1."""
    return next((w for w in range(window, 1, -1) if draft_s(w) <= step_s), 1)
