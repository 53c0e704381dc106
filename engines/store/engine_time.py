"""Engine and times of each rollout, for whoever draws them."""

from pathlib import Path
from typing import Any

from engines.store.opening import connect

QUERY = """
SELECT split, step, prompt_key, sample_index, engine, started_s, finished_s, response_tokens,
    finish_reason, drafter, num_draft_tokens, num_accepted_tokens, reward
FROM rollouts LEFT JOIN rewards USING (split, step, prompt_key, sample_index)
ORDER BY started_s, finished_s
"""
_NAMED = ("engine", "started_s", "finished_s")


def engine_time(path: Path) -> list[dict[str, Any]]:
    """Rollouts of a run, each with its `name`, `engine`, `started_s` and `finished_s` (Unix times),
    and the rest as `args`. Raises ValueError when the store is held, or is none."""
    con = connect(path, read_only=True, lock_timeout_s=0.0)
    try:
        rows = con.sql(QUERY).to_arrow_table().to_pylist()
    finally:
        con.close()
    return [
        {
            "name": f"{row['split']} step {row['step']}",
            **{name: row[name] for name in _NAMED},
            "args": {name: value for name, value in row.items() if name not in _NAMED},
        }
        for row in rows
    ]
