"""What a drafter and a window policy would have done with responses that are known. Pure.

Sampling is exact, so a draft token would have been accepted exactly when it is the token that was
generated there. The responses go in lockstep through the same compiled call as in an engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.histospec.acceptance import Acceptance
from engines.histospec.drafting import NO_INDEX, draft_batch
from engines.histospec.gate import Gate
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
    *,
    gate: Gate | None = None,
    acceptance: Acceptance | None = None,
) -> Replay:
    """Generate every response again, from its first token to its last.

    Args:
        prompts, responses: token ids; no response is empty.
        table: `IndexTable.rows`.
        slots: int32 [responses], the index of each, or `NO_INDEX`.
        gate: keeps what pays in the batch of unfinished responses; None: everything is verified.
        acceptance: what the gate goes by, learning from every pass; None: a fresh one.
    """
    token_ids, at, ends = _known(prompts, responses, policy.cap)
    drafting = _Drafting(table, policy.cap, gate, acceptance or Acceptance())
    windows = policy.first(len(ends))
    counts = np.zeros((4, len(ends)), np.int64)
    live, rows = np.arange(len(ends)), token_ids
    while len(live):
        # The pass itself yields one token, so the last one is never worth drafting.
        wanted = np.minimum(windows[live], ends[live] - at[live] - 1)
        drafted, accepted = drafting.of_pass(slots[live], rows, at[live], wanted)
        counts[:, live] += [np.ones_like(drafted), drafted > 0, drafted, accepted]
        windows[live] = policy.next(windows[live], drafted, accepted)
        at[live] += accepted + 1
        unfinished = at[live] < ends[live]
        if not unfinished.all():
            live, rows = live[unfinished], rows[unfinished]
    return Replay(*counts)


@dataclass(frozen=True, slots=True)
class _Drafting:
    table: np.ndarray
    cap: int
    gate: Gate | None
    acceptance: Acceptance

    def of_pass(
        self, slots: np.ndarray, token_ids: np.ndarray, at: np.ndarray, windows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """int32 [rows] tokens verified, int32 [rows] accepted; rows are known up to `at`."""
        if self.gate and not ((slots != NO_INDEX).any() and self.gate.looks(len(at))):
            return np.zeros(len(at), np.int32), np.zeros(len(at), np.int32)
        drafts = np.zeros((len(at), self.cap), np.int32)
        evidence = np.zeros(drafts.shape, np.uint8)
        drafted = draft_batch(self.table, slots, token_ids, at, windows, drafts, evidence)
        if self.gate:
            probabilities = self.acceptance.of_drafts(evidence, drafted)
            drafted = self.gate.keep(probabilities, drafted, float(at.sum()))
        columns = np.arange(self.cap)
        right = drafts == np.take_along_axis(token_ids, at[:, None] + columns, axis=1)
        right &= columns < drafted[:, None]
        accepted = np.cumprod(right, axis=1, dtype=np.int32).sum(axis=1, dtype=np.int32)
        if self.gate:
            self.acceptance.observe(evidence, drafted, accepted)
        return drafted, accepted


def _known(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], room: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int32 [responses, any] tokens of both, with room after them; int32 [responses] where the
    responses begin and end."""
    known = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    ends = np.array([len(tokens) for tokens in known], np.int32)
    token_ids = np.zeros((len(known), int(ends.max(initial=0)) + room + 1), np.int32)
    for row, tokens in zip(token_ids, known, strict=True):
        row[: len(tokens)] = tokens
    at = np.array([len(prompt) for prompt in prompts], np.int32)
    assert (at < ends).all()
    return token_ids, at, ends
