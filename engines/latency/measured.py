"""Latency model of an engine that measured its own steps during a run."""

from collections.abc import Iterable, Sequence

import numpy as np

from refrain.schemas.step import EngineShare

FEW_ROWS = 16
"""Number of rows whose cost differs from that of further rows. On CPUs the first rows cost more,
because they leave cores idle. On GPUs they cost next to nothing, because a pass mostly reads
weights."""


class MeasuredLatency:
    """Latency model with one cost for the first `FEW_ROWS` rows and one for each further row.
    A prompt token counts as a draft token, because a pass verifies both in the same way.

    `step_costs`: see `schemas.counts.DraftingCounts`, of one engine at one TP degree.
    `drafting_s`: mean seconds of drafting in a step.
    """

    def __init__(self, step_costs: Sequence[float], drafting_s: float = 0.0) -> None:
        self._drafting_s = drafting_s
        self._step_s, self._few_s, self._request_s, self._token_s = step_costs[:4]
        self._row_s, self._draft_s = step_costs[4:]

    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float:
        del tp_degree
        few = min(batch, FEW_ROWS)
        rows_s = few * self._few_s + (batch - few) * self._request_s
        return self._step_s + rows_s + context_tokens * self._token_s

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        drafts_s = batch * (self._row_s + window * self._draft_s) if window else 0.0
        return self.decode_s(tp_degree, batch, context_tokens) + drafts_s

    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float:
        del tp_degree
        return self._step_s + batch * (self._row_s + rms_tokens * self._draft_s)

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        """Return the mean of all steps: an engine does not measure more of its drafting."""
        del drafter, batch, window
        return self._drafting_s


def measured_by(shares: Iterable[EngineShare]) -> MeasuredLatency | None:
    """Return a model of the median costs of the engines that know theirs, or None if no engine
    does."""
    known = [share.drafting for share in shares if share.drafting.step_costs]
    if not known:
        return None
    costs = np.median([counts.step_costs for counts in known], axis=0)
    drafting_s = np.median([counts.draft_s / max(1, counts.num_steps) for counts in known])
    return MeasuredLatency(costs.tolist(), float(drafting_s))
