"""Query a live or ended run's store in SQL. Each query runs in its own process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from refrain.engines.reports.tables import printable
from refrain.engines.store.sandbox import MAX_TIMEOUT_S, MEMORY_BYTES, REFUSED
from refrain.tasks.run.run_dir import STORE_FILE

_COMMAND = (sys.executable, "-P", "-m", "refrain.engines.store.reader")
_ROOT = Path(__file__).parents[2]
_START_S = 30.0
"""Seconds that the process may take to start on a busy machine."""


def query_run(run_dir: Path, query: str, timeout_s: float) -> pa.Table:
    """Return the result of a query. Raise ValueError when the query is refused or takes longer than
    `timeout_s` seconds, and RuntimeError when its process dies."""
    if not 0.0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(
            f"the timeout must be above 0 and at most {MAX_TIMEOUT_S:.0f} s, not {timeout_s:g}"
        )
    try:
        query.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the query is not UTF-8 at character {error.start + 1}") from error
    path = (run_dir / STORE_FILE).absolute()
    request = {"path": str(path), "query": query, "timeout_s": timeout_s}
    late = f"no answer within {timeout_s:g} s: ask for less, or give a longer --timeout"
    try:
        done = subprocess.run(
            _COMMAND,
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=timeout_s + _START_S,
            env=_environment(),
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(late) from error
    if done.returncode == 0:
        return pa.ipc.open_stream(done.stdout).read_all()
    if done.returncode == -signal.SIGALRM:
        raise ValueError(late)
    said = printable(done.stderr.decode(errors="replace").strip(), lines=True)
    if done.returncode == REFUSED:
        raise ValueError(said)
    *_, last = ["", *said.splitlines()]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    raise RuntimeError(
        f"the query's process died ({how}). It may use {MEMORY_BYTES // 2**30} GiB of memory, and "
        f"this machine may have less: ask for fewer rows or columns. {last}".strip()
    )


def _environment() -> dict[str, str]:
    """Return an environment without secrets, because the query could read them."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return kept | {"PYTHONPATH": str(_ROOT), "PYTHONUTF8": "1", "OMP_NUM_THREADS": "2"}
