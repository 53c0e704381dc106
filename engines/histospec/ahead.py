"""Drafts that are made one step ahead: nobody knows yet what the running step adds. Pure.

    text that was known    a b c
    draft                          d e f g h       follows the known text
    the running step adds          d e             both equal the draft
    verified next                      f g         as many as were reserved

If the running step adds another token than the draft has there, nothing is verified.
"""

from dataclasses import dataclass

import numpy as np

from engines.histospec.drafter import Drafts, HistoryDrafter


@dataclass(frozen=True, slots=True)
class AheadDrafts:
    """Drafts of some requests, and how many tokens of each to verify."""

    num_known: np.ndarray
    """int32 [rows]: tokens of prompt and response that the draft follows."""
    drafts: Drafts
    num_verified: np.ndarray
    """int32 [rows]: tokens to verify."""

    def of(self, rows: np.ndarray, num_verified: np.ndarray) -> "AheadDrafts":
        """Return some of the rows. `rows`: int64 [rows] or bool [all rows]."""
        all = self.drafts
        drafts = Drafts(all.num[rows], all.tokens[rows], all.evidence[rows])
        return AheadDrafts(self.num_known[rows], drafts, num_verified)

    def learn(
        self,
        drafter: HistoryDrafter,
        places: np.ndarray,
        num_right: np.ndarray,
        num_before: np.ndarray,
        num_now: np.ndarray,
    ) -> None:
        """Learn from the text, once a step has verified the drafts.

        `places`: int64 [rows], of the requests in the drafter.
        `num_right`: int32 [rows], draft tokens that are in the text, up to the first other one.
        `num_before`, `num_now`: int32 [rows], tokens of prompt and response before and after the
            step.
        """
        began, now = num_before - self.num_known, num_now - self.num_known
        evidence, num = self.drafts.evidence, self.drafts.num
        tested = np.minimum(now, num).astype(np.int32)
        drafter.acceptance.observe(evidence, tested, np.minimum(num_right, tested))
        # Without new tokens the request was preempted, or had ended before the step.
        fits = (num_right >= began) & (began < num) & (now > began)
        verified = np.where(fits, np.minimum(num - began, self.num_verified), 0).astype(np.int32)
        accepted = np.clip(np.minimum(num_right, now - 1) - began, 0, verified).astype(np.int32)
        first = np.take_along_axis(evidence, np.where(fits, began, 0)[:, None], axis=1)[:, 0]
        drafter.verified(places, first, verified, accepted)
