"""Metrics of a step by the source of its prompts (`data.train`). Pure."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa


def source_metrics(
    rows: pa.Table, sources: Mapping[str, str], pass_score: float
) -> dict[str, float]:
    """Return the metrics `source/*` of the sources that the step has responses of.

    `rows`: `prompt_key`, `response_tokens` and `reward` of its responses. `sources`: by prompt.
    Failed conversations without a reward count for lengths only.
    """
    keys = rows["prompt_key"].to_numpy(zero_copy_only=False)
    of_row = np.array([sources[key] for key in keys])
    metrics: dict[str, float] = {}
    for source in np.unique(of_row):
        own = rows.filter(pa.array(of_row == source))
        shares = {
            "share": len(np.unique(keys[of_row == source])) / len(np.unique(keys)),
            "response_length": float(own["response_tokens"].to_numpy().mean()),
        }
        rewards = own["reward"].drop_null().to_numpy()
        if len(rewards):
            shares["score"] = float(rewards.mean())
            shares["pass_rate"] = float((rewards >= pass_score).mean())
        metrics |= {f"source/{source}/{name}": value for name, value in shares.items()}
    return metrics
