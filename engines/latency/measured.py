"""The latency model of an engine that measured its own steps while a run went on."""

from collections.abc import Iterable, Sequence

import numpy as np

from schemas.step import EngineShare

FEW_ROWS = 16
"""Rows that cost otherwise than those beyond. On CPUs the first ones cost more, as they leave cores
without work; on GPUs a pass reads the weights, and its first rows cost next to nothing."""


class MeasuredLatency:
    """Linear in what a step holds beyond a few rows; implements `Latency` for decoding and
    verifying.

    `step_costs` are those of `schemas.step.EngineShare`. They are of one engine at one TP degree.
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
        raise NotImplementedError("an engine does not measure what a prefill takes")

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        raise NotImplementedError("an engine measures drafting as seconds of all its steps")


def measured_by(shares: Iterable[EngineShare]) -> MeasuredLatency | None:
    """The median of each cost over the engines that know theirs; None where none does."""
    costs = [share.drafting.step_costs for share in shares if share.drafting.step_costs]
    return MeasuredLatency(np.median(costs, axis=0).tolist()) if costs else None
