"""Limits of a query's process, for itself and for the one that starts it."""

import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

MAX_TIMEOUT_S = 86_400.0
"""Longest time for a query."""
MEMORY_BYTES = 6 * 2**30
"""Most memory: DuckDB keeps to less, but does not count all that it takes."""
REFUSED = 2
"""Exit code with a reason on standard error."""


def limit_process(timeout_s: float) -> None:
    """Bound what this process takes, also when the one that started it is gone. SIGALRM ends it
    after `timeout_s` seconds, it writes no files, and when memory is short it goes before a run."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    for nothing in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(nothing, (0, 0))
    os.nice(5)
    with suppress(OSError):  # Without such a file the kernel chooses by itself.
        Path("/proc/self/oom_score_adj").write_text("1000")
