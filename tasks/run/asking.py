"""A run's store, asked in SQL whether the run is live or over."""

from pathlib import Path

import pyarrow as pa

from engines.store.listener import ask_live
from engines.store.store import open_read_only
from tasks.run.run_dir import STORE_FILE


def ask_run(run_dir: Path, query: str, timeout_s: float) -> pa.Table:
    """The answer. Raises ValueError when the query is refused, or takes longer."""
    table = ask_live(run_dir, query, timeout_s)
    if table is None:
        with open_read_only(run_dir / STORE_FILE) as store:
            table = store.ask(query, timeout_s)
    return table
