"""Latency model of an engine that measured its own steps during a run."""

from collections.abc import Iterable, Sequence

import numpy as np

from schemas.step import EngineShare

FEW_ROWS = 16
"""Number of rows whose cost differs from that of further rows. On CPUs the first rows cost more,
because they leave cores idle. On GPUs they cost next to nothing, because a pass mostly reads
weights."""


class MeasuredLatency:
    """Latency model with one cost for the first `FEW_ROWS` rows and one for each further row.
    Implements decoding and verification of `Latency`.

    `step_costs`: see `schemas.step.EngineShare`, of one engine at one TP degree.
    """

    def __init__(self, step_costs: Sequence[float]) -> None:
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
        raise NotImplementedError("an engine does not measure the time of a prefill")

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        raise NotImplementedError("an engine measures only the total drafting time of its steps")


def measured_by(shares: Iterable[EngineShare]) -> MeasuredLatency | None:
    """Return a model of the median costs of the engines that know theirs, or None if no engine
    does."""
    costs = [share.drafting.step_costs for share in shares if share.drafting.step_costs]
    return MeasuredLatency(np.median(costs, axis=0).tolist()) if costs else None
