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

from engines.specactor.ladder import Ladder

COLLAPSE_SHARE = 0.5
"""Share of the best recent acceptance below which a drafter that does not pay has collapsed."""
NUM_RECENT = 8
"""Policy versions that count, of those at which the drafter was measured."""
MIN_DRAFT_TOKENS = 256
"""A version at which fewer were accepted or rejected says nothing yet."""
TRY_EVERY = 4
"""Steps from one trial to the next."""
TRY_SHARE = 0.02
"""Share of a step's requests on which a drafter that is off is tried; at least one."""


class DrafterHealth:
    """Acceptance of every drafter, from counts that are added as steps end."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[int, tuple[int, int]]] = {}
        """Draft tokens accepted and rejected, by drafter and policy version."""

    def add(
        self, policy_version: int, drafter: str, num_accepted: int, num_rejections: int
    ) -> None:
        """Take in what a step, or a part of one, verified: draft tokens accepted, and verifications
        that rejected one."""
        assert num_accepted >= 0 <= num_rejections
        if not num_accepted + num_rejections:
            return
        versions = self._counts.setdefault(drafter, {})
        accepted, rejected = versions.get(policy_version, (0, 0))
        versions[policy_version] = accepted + num_accepted, rejected + num_rejections
        while len(versions) > NUM_RECENT:
            del versions[min(versions)]

    def history(self, drafter: str) -> dict[int, float]:
        """Probability that a token is accepted, by policy version, the recent ones, ascending."""
        versions = self._counts.get(drafter, {})
        return {
            version: accepted / (accepted + rejected)
            for version, (accepted, rejected) in sorted(versions.items())
            if accepted + rejected >= MIN_DRAFT_TOKENS
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
