"""What a drafter and a window policy would have done with responses that are known. Pure.

Sampling is exact, so a draft token would have been accepted exactly when it is the token that was
generated there. The responses go in lockstep through the same compiled call as in an engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.histospec.drafting import draft_batch
from engines.histospec.window import WindowPolicy


@dataclass(frozen=True)
class Replay:
    """Counts, each int64 [responses]."""

    num_passes: np.ndarray
    """Forward passes, with drafts and without."""
    num_verifications: np.ndarray
    """Passes that verified at least one draft token."""
    num_drafted: np.ndarray
    num_accepted: np.ndarray

    @property
    def acceptance_length(self) -> float:
        """Tokens per forward pass; 1 without drafting."""
        return 1.0 + float(self.num_accepted.sum() / self.num_passes.sum())

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 when nothing was drafted."""
        return float(self.num_accepted.sum() / max(1, self.num_drafted.sum()))

    @property
    def speculation_rate(self) -> float:
        """Share of all tokens that came from drafts."""
        tokens = self.num_accepted.sum() + self.num_passes.sum()
        return float(self.num_accepted.sum() / tokens)


def replay(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    table: np.ndarray,
    slots: np.ndarray,
    policy: WindowPolicy,
) -> Replay:
    """Generate every response again, from its first token to its last.

    Args:
        prompts, responses: token ids; no response is empty.
        table: `IndexTable.rows`.
        slots: int32 [responses], the index of each, or `NO_INDEX`.
    """
    known = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    ends = np.array([len(tokens) for tokens in known])
    token_ids = np.zeros((len(known), int(ends.max(initial=0)) + policy.cap + 1), np.int32)
    for row, tokens in zip(token_ids, known, strict=True):
        row[: len(tokens)] = tokens
    at = np.array([len(prompt) for prompt in prompts], np.int32)
    assert (at < ends).all()
    windows = policy.first(len(known))
    counts = np.zeros((4, len(known)), np.int64)
    live = np.arange(len(known))
    while len(live):
        # The pass itself yields one token, so the last one is never worth drafting.
        left = (ends[live] - at[live]).astype(np.int32)
        wanted = np.minimum(windows[live], left - 1)
        drafts = np.zeros((len(live), policy.cap), np.int32)
        evidence = np.zeros(drafts.shape, np.uint8)
        rows = token_ids[live]
        drafted = draft_batch(table, slots[live], rows, at[live], wanted, drafts, evidence)
        places = at[live, None] + np.arange(policy.cap)
        right = drafts == np.take_along_axis(rows, places, axis=1)
        right &= np.arange(policy.cap) < drafted[:, None]
        accepted = np.cumprod(right, axis=1).sum(axis=1)
        counts[:, live] += [np.ones_like(drafted), drafted > 0, drafted, accepted]
        windows[live] = policy.next(windows[live], drafted, accepted)
        at[live] += accepted.astype(np.int32) + 1
        live = live[at[live] < ends[live]]
    return Replay(*counts)
