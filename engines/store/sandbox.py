"""Time and memory limits of the process that runs a user's query."""

import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

MAX_TIMEOUT_S = 86_400.0
"""Longest time that a query may take."""
MEMORY_BYTES = 6 * 2**30
"""Largest memory of the process. DuckDB's own limit is lower, but DuckDB does not count everything
that it allocates."""
REFUSED = 2
"""Exit code of a refused query; the reason is on standard error."""


def limit_process(timeout_s: float) -> None:
    """Limit this process, even if its parent has ended.

    SIGALRM ends the process after `timeout_s` seconds. The process cannot write files. When memory
    runs out, the kernel kills this process before a run.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    for nothing in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(nothing, (0, 0))
    os.nice(5)
    with suppress(OSError):  # Without this file the kernel chooses which process to kill.
        Path("/proc/self/oom_score_adj").write_text("1000")
