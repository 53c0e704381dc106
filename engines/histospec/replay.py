"""Replay of known responses: what a drafter and a window policy would have done. Pure.

Sampling is exact, so a draft token would have been accepted exactly if it equals the token that was
generated there. All responses advance in lockstep through the compiled call that engines use.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refrain.engines.histospec.acceptance import Acceptance
from refrain.engines.histospec.drafting import (
    LONGEST_ALONE,
    draft_batch,
    without_noise,
    without_turns,
)
from refrain.engines.histospec.gate import Gate
from refrain.engines.histospec.index import Tokens
from refrain.engines.histospec.matching import NO_INDEX
from refrain.engines.histospec.window import WindowPolicy


@dataclass(frozen=True)
class Replay:
    """Counts, each int64 [responses]."""

    num_passes: np.ndarray
    """Forward passes, with drafts and without."""
    num_verifications: np.ndarray
    """Passes that verified at least one draft token."""
    num_drafted: np.ndarray
    num_accepted: np.ndarray


def replay(
    prompts: Sequence[Tokens],
    responses: Sequence[Tokens],
    table: np.ndarray,
    slots: np.ndarray,
    policy: WindowPolicy,
    *,
    gate: Gate | None = None,
    acceptance: Acceptance | None = None,
    sample_keys: np.ndarray | None = None,
    starts: np.ndarray | None = None,
) -> Replay:
    """Generate every response again, from its first token to its last. No response may be empty.

    `table`: `IndexTable.rows`.
    `slots`: int32 [responses], index of each, or `NO_INDEX`.
    `gate`: keeps what pays in the batch of unfinished responses. None: every draft is verified.
    `acceptance`: estimate for the gate and for the choice of a match; it learns from every pass.
        None: a new one for the gate, and the longest match drafts.
    `sample_keys`: int64 [responses], keys of the noise that sampled each, to draft what the noise
        draws. None: unknown.
    `starts`: see `draft_batch`; int32 [responses]. None: no response is a later turn.
    """
    token_ids, at, ends = known_sequences(prompts, responses, policy.cap)
    longest_alone = acceptance is None
    gate, acceptance = gate or Gate(None), acceptance or Acceptance()
    windows = policy.first(len(ends))
    noise = without_noise(len(ends)) if sample_keys is None else sample_keys
    starts = without_turns(len(ends)) if starts is None else starts
    counts = np.zeros((4, len(ends)), np.int64)
    live, rows = np.arange(len(ends)), token_ids
    while len(live):
        num_tokens = at[live]
        drafted = accepted = np.zeros(len(live), np.int32)
        if (slots[live] != NO_INDEX).any() and gate.looks(len(live)):
            # The pass itself yields one token, so drafting the last one never pays.
            wanted = np.minimum(windows[live], ends[live] - num_tokens - 1)
            drafts = np.zeros((len(live), policy.cap), np.int32)
            evidence = np.zeros(drafts.shape, np.uint16)
            worth = LONGEST_ALONE if longest_alone else acceptance.worth
            args = (slots[live], rows, num_tokens, wanted, noise[live], starts[live])
            drafted = draft_batch(table, *args, worth, drafts, evidence)
            probabilities = acceptance.of_drafts(evidence, drafted)
            known = (float(num_tokens.sum()), acceptance.num_observed)
            drafted = gate.keep(probabilities, drafted, *known)
            accepted = count_accepted(drafts, drafted, rows, num_tokens)
            acceptance.observe(evidence, drafted, accepted)
        counts[:, live] += [np.ones_like(drafted), drafted > 0, drafted, accepted]
        windows[live] = policy.next(windows[live], drafted, accepted)
        at[live] += accepted + 1
        unfinished = at[live] < ends[live]
        if not unfinished.all():
            live, rows = live[unfinished], rows[unfinished]
    return Replay(*counts)


def known_sequences(
    prompts: Sequence[Tokens], responses: Sequence[Tokens], room: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens of prompts and responses, int32 [responses, any], with `room` free columns
    at the end. Also return where each response begins and ends, int32 [responses]."""
    at = np.array([len(prompt) for prompt in prompts], np.int32)
    ends = at + np.array([len(response) for response in responses], np.int32)
    assert (at < ends).all()
    token_ids = np.zeros((len(ends), int(ends.max(initial=0)) + room), np.int32)
    for row, prompt, response in zip(token_ids, prompts, responses, strict=True):
        start, end = len(prompt), len(prompt) + len(response)
        row[:start], row[start:end] = prompt, response
    return token_ids, at, ends


def count_accepted(
    drafts: np.ndarray, num_drafted: np.ndarray, token_ids: np.ndarray, at: np.ndarray
) -> np.ndarray:
    """Return how many draft tokens equal the tokens from `at` on, up to the first that differs;
    int32 [rows]."""
    columns = np.arange(drafts.shape[1])
    right = drafts == np.take_along_axis(token_ids, at[:, None] + columns, axis=1)
    right &= columns < num_drafted[:, None]
    return np.cumprod(right, axis=1, dtype=np.int32).sum(axis=1, dtype=np.int32)
