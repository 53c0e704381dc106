"""Draft tokens that a step verifies when it has no room for all that was drafted. Pure."""

import numpy as np


def max_draft_tokens(step_tokens: int, num_rows: int) -> int:
    """Most draft tokens of a step of `num_rows` requests: half of what these leave of its
    `step_tokens`. The other half is for prompts, which the engine serves after drafts."""
    return max(0, step_tokens - num_rows) // 2


def keep_likeliest(
    probabilities: np.ndarray, num_drafted: np.ndarray, max_tokens: int
) -> np.ndarray:
    """Draft tokens kept of each request, from its first on; int32 [rows], at most `max_tokens` in
    all: those that most likely are accepted.

    `probabilities`: [rows, window], that a token and all before it are accepted. `num_drafted`:
    int32 [rows].
    """
    if int(num_drafted.sum()) <= max_tokens:
        return num_drafted
    num_rows, window = probabilities.shape
    drafted = np.arange(window) < num_drafted[:, None]
    # By columns, so that of equal ones the earlier in a request come first.
    columns = np.where(drafted, probabilities, -1.0).T.ravel()
    kept = np.argsort(-columns, kind="stable")[:max_tokens]
    return np.bincount(kept % num_rows, minlength=num_rows).astype(np.int32)
