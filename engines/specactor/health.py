"""Tracks whether drafters still match the policy: acceptance by policy version. Pure.

    healthy ──below `COLLAPSE_SHARE` of its best recent acceptance, and no longer pays──► collapsed
       ▲                                                                                     │
       └─────────a version at which it is above that share again, or pays────────────────────┘

A collapsed drafter leaves the ladder at once. The ladder ranks by the mean over the last steps,
which would notice too late. A drafter that is off is not measured. So in every `TRY_EVERY`-th step,
a few requests try each drafter that collapsed or did not pay when it was last measured. One good
trial brings it back. If no trial is good, its better versions leave the `NUM_RECENT` that count.
Then it counts as a poor drafter, not a collapsed one, and the ladder passes over it.

Not in the paper, which found that "the average acceptance rate changes little between steps".
"""

import math

from refrain.engines.specactor.ladder import Ladder

COLLAPSE_SHARE = 0.5
"""Share of the best recent acceptance. Below it, a drafter that does not pay has collapsed."""
NUM_RECENT = 8
"""Number of policy versions that count, among those at which the drafter was measured."""
MIN_DRAFT_TOKENS = 256
"""Draft tokens accepted or rejected before a version counts."""
TRY_EVERY = 4
"""Steps from one trial to the next."""
TRY_SHARE = 0.02
"""Share of a step's requests that try a drafter that is off, at least one request."""


class DrafterHealth:
    """Acceptance of every drafter, from counts added as steps end."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[int, tuple[int, int]]] = {}
        """Draft tokens accepted and rejected, by drafter and policy version."""

    def add(
        self, policy_version: int, drafter: str, num_accepted: int, num_rejections: int
    ) -> None:
        """Add what a step or a part of it verified: accepted draft tokens, and verifications that
        rejected one."""
        assert num_accepted >= 0 <= num_rejections
        if not num_accepted + num_rejections:
            return
        versions = self._counts.setdefault(drafter, {})
        accepted, rejected = versions.get(policy_version, (0, 0))
        versions[policy_version] = accepted + num_accepted, rejected + num_rejections
        while len(versions) > NUM_RECENT:
            del versions[min(versions)]

    def history(self, drafter: str) -> dict[int, float]:
        """Return the probability that a token is accepted, by recent policy version, ascending."""
        versions = self._counts.get(drafter, {})
        return {
            version: accepted / (accepted + rejected)
            for version, (accepted, rejected) in sorted(versions.items())
            if accepted + rejected >= MIN_DRAFT_TOKENS
        }

    def collapsed(self, drafter: str, ladder: Ladder, batch: int) -> bool:
        """Return whether the last acceptance is far below the best recent one and does not pay."""
        recent = list(self.history(drafter).values())
        if not recent or recent[-1] >= COLLAPSE_SHARE * max(recent):
            return False
        return not ladder.best(drafter, recent[-1], batch).window

    def acceptances(self, ladder: Ladder, batch: int) -> dict[str, float]:
        """Return the recent mean of each measured drafter of the ladder, without collapsed ones.
        `choose_drafter` takes these."""
        means = {}
        for drafter in ladder.drafters:
            recent = self.history(drafter)
            if recent and not self.collapsed(drafter, ladder, batch):
                means[drafter] = sum(recent.values()) / len(recent)
        return means

    def trials(self, step: int, ladder: Ladder, batch: int, num_requests: int) -> dict[str, int]:
        """Return the number of requests in this step that try each drafter that is off."""
        if step % TRY_EVERY:
            return {}
        num = max(1, math.floor(TRY_SHARE * num_requests))
        off = [drafter for drafter in ladder.drafters if not self._pays(drafter, ladder, batch)]
        return dict.fromkeys(off, num)

    def _pays(self, drafter: str, ladder: Ladder, batch: int) -> bool:
        """Return whether it paid when last measured. False if it never was measured."""
        recent = list(self.history(drafter).values())
        return bool(recent) and ladder.best(drafter, recent[-1], batch).window > 0
