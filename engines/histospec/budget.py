"""Choice of the draft tokens to verify when a step has no room for all of them. Pure."""

import numpy as np


def max_draft_tokens(step_tokens: int, num_rows: int) -> int:
    """Return the most draft tokens of a step with `num_rows` requests: half of the room that these
    leave in `step_tokens`. The other half is for prompts, which the engine schedules after drafts.
    """
    return max(0, step_tokens - num_rows) // 2


def keep_likeliest(
    probabilities: np.ndarray, num_drafted: np.ndarray, max_tokens: int
) -> np.ndarray:
    """Keep the draft tokens that are most likely to be accepted, at most `max_tokens` in all.
    Return how many of each request's are kept, from its first on; int32 [rows].

    `probabilities`: [rows, window], that a token and all before it are accepted.
    `num_drafted`: int32 [rows].
    """
    if int(num_drafted.sum()) <= max_tokens:
        return num_drafted
    num_rows, window = probabilities.shape
    drafted = np.arange(window) < num_drafted[:, None]
    # Sort by columns: of equal tokens, those nearer the start of a draft come first.
    columns = np.where(drafted, probabilities, -1.0).T.ravel()
    kept = np.argsort(-columns, kind="stable")[:max_tokens]
    return np.bincount(kept % num_rows, minlength=num_rows).astype(np.int32)
