"""Whether drafters still know the policy: acceptance by policy version. Pure.

    healthy ──below `COLLAPSE_SHARE` of its best recent acceptance, and pays no longer──► collapsed
       ▲                                                                                      │
       └─────────a version at which it is above that share again, or pays─────────────────────┘

A collapsed drafter is off the ladder at once: the mean over the last steps, by which the ladder
ranks, would notice late. What is off is not measured. So every drafter that collapsed, or does not
pay as it was last measured, is tried on a few requests of every `TRY_EVERY`-th step; one trial in
which it is good again brings it back. If it never is, the versions at which it was better leave the
`NUM_RECENT` that count; it is then a poor drafter rather than a collapsed one, and the ladder
passes over it.

Not in the paper, which found that "the average acceptance rate changes little between steps".
"""

import math

from engines.specactor.ladder import Ladder, token_acceptance
from schemas.rollout import DraftSetting

COLLAPSE_SHARE = 0.5
"""Share of the best recent acceptance below which a drafter that does not pay has collapsed."""
NUM_RECENT = 8
"""Policy versions that count, of those at which the drafter was measured."""
MIN_DRAFT_TOKENS = 256
"""A version at which fewer were verified says nothing yet."""
TRY_EVERY = 4
"""Steps from one trial to the next."""
TRY_SHARE = 0.02
"""Share of a step's requests on which a drafter that is off is tried; at least one."""


class DrafterHealth:
    """Acceptance of every drafter, from counts that are added as steps end."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[int, dict[int, list[int]]]] = {}
        """[drafted, accepted] tokens by drafter, policy version and window."""

    def add(
        self, policy_version: int, setting: DraftSetting, num_drafted: int, num_accepted: int
    ) -> None:
        """Take in what a step, or a part of one, verified."""
        assert 0 <= num_accepted <= num_drafted
        if num_drafted == 0:
            return
        versions = self._counts.setdefault(setting.drafter, {})
        counts = versions.setdefault(policy_version, {}).setdefault(setting.window, [0, 0])
        counts[0] += num_drafted
        counts[1] += num_accepted
        while len(versions) > NUM_RECENT:
            del versions[min(versions)]

    def history(self, drafter: str) -> dict[int, float]:
        """Probability that a token is accepted, by policy version, the recent ones, ascending."""
        versions = self._counts.get(drafter, {})
        return {
            version: _mean(windows)
            for version, windows in sorted(versions.items())
            if _num_drafted(windows) >= MIN_DRAFT_TOKENS
        }

    def collapsed(self, drafter: str, ladder: Ladder, batch: int) -> bool:
        """Whether its last acceptance is a fraction of the best recent one, and pays no longer."""
        recent = list(self.history(drafter).values())
        if not recent or recent[-1] >= COLLAPSE_SHARE * max(recent):
            return False
        return not ladder.best(drafter, recent[-1], batch).window

    def acceptances(self, ladder: Ladder, batch: int) -> dict[str, float]:
        """Recent mean of every drafter of the ladder that was measured and has not collapsed: what
        `choose_drafter` chooses from."""
        means = {}
        for drafter in ladder.drafters:
            recent = self.history(drafter)
            if recent and not self.collapsed(drafter, ladder, batch):
                means[drafter] = sum(recent.values()) / len(recent)
        return means

    def trials(self, step: int, ladder: Ladder, batch: int, num_requests: int) -> dict[str, int]:
        """How many requests of this step to try each drafter on that is off."""
        if step % TRY_EVERY:
            return {}
        num = max(1, math.floor(TRY_SHARE * num_requests))
        off = [drafter for drafter in ladder.drafters if not self._pays(drafter, ladder, batch)]
        return dict.fromkeys(off, num)

    def _pays(self, drafter: str, ladder: Ladder, batch: int) -> bool:
        """Whether it pays, as it was last measured; no where it never was."""
        recent = list(self.history(drafter).values())
        return bool(recent) and ladder.best(drafter, recent[-1], batch).window > 0


def _num_drafted(windows: dict[int, list[int]]) -> int:
    return sum(num_drafted for num_drafted, _ in windows.values())


def _mean(windows: dict[int, list[int]]) -> float:
    """Mean of the windows' acceptances, weighted by drafted tokens."""
    return sum(
        num_drafted / _num_drafted(windows) * token_acceptance(window, num_accepted / num_drafted)
        for window, (num_drafted, num_accepted) in windows.items()
    )
