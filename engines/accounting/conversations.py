"""Metrics of a step's conversations with environments. Pure."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from refrain.schemas.rollout import FinishReason

CUTS = (FinishReason.TURNS, FinishReason.TIME, FinishReason.CONTEXT)
"""Limits that only a conversation has."""
_PER_RESPONSE = {
    "observed_tokens": "num_observed",
    "calls": "num_calls",
    "failed_calls": "num_failed_calls",
    "wait_s": "waited_s",
}
"""Metrics by the field of a turn that they add up."""


def conversation_metrics(rows: pa.Table, generation_s: float) -> dict[str, float]:
    """Return the metrics `environment/*`, or nothing if no response has turns.

    `rows`: `turns` and `finish_reason` of a step's responses (`Store.rollouts`). `generation_s`:
    seconds in which they were generated.
    """
    turns: Any = rows["turns"].combine_chunks()
    num_turns = pc.call_function("list_value_length", [turns]).fill_null(0).to_numpy()
    if not num_turns.any():
        return {}
    sums = _sums_of(turns.flatten(), num_turns) | {"turns": num_turns}
    metrics = {f"environment/{name}/mean": float(values.mean()) for name, values in sums.items()}
    metrics |= {f"environment/{name}/max": float(sums[name].max()) for name in ("turns", "wait_s")}
    if generation_s > 0:
        metrics["environment/wait_share"] = metrics["environment/wait_s/mean"] / generation_s
    metrics |= _accept_rates(turns.flatten(), num_turns)
    return metrics | _cut_shares(rows["finish_reason"].to_pylist())


def _sums_of(turns: Any, num_turns: np.ndarray) -> dict[str, np.ndarray]:
    """Return sums over the turns of each response. `turns`: of all responses, one after another."""
    response = np.repeat(np.arange(len(num_turns)), num_turns)

    def sums(field: str) -> np.ndarray:
        values = turns.field(field).fill_null(0).to_numpy()
        return np.bincount(response, weights=values, minlength=len(num_turns))

    return {name: sums(field) for name, field in _PER_RESPONSE.items()}


def _accept_rates(turns: Any, num_turns: np.ndarray) -> dict[str, float]:
    """Return accepted over drafted tokens of first and of later turns, where there are drafts."""
    is_first = np.zeros(len(turns), bool)
    is_first[(np.cumsum(num_turns) - num_turns)[num_turns > 0]] = True
    drafted, accepted = (
        turns.field(name).fill_null(0).to_numpy()
        for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    return {
        f"environment/accept_rate/{name}": float(accepted[own].sum() / drafted[own].sum())
        for name, own in (("first_turns", is_first), ("later_turns", ~is_first))
        if drafted[own].any()
    }


def _cut_shares(reasons: list[str]) -> dict[str, float]:
    return {f"environment/cut/{cut}": reasons.count(cut) / len(reasons) for cut in CUTS}
