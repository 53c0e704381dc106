"""Failures in writing a run's record. They do not end the run.

The record is for people: metrics, pages, progress files, copies of checkpoints. All code
that writes to it runs inside `Failures.contained`. Each failure stays visible:

    contained ─► count (summary.json, `refrain show`)
              ─► traceback in the run's record.log
              ─► one warning for the first failure of each kind
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

LOG_FILE = "record.log"
LOG_BYTES = 2**20
"""Size at which a new log file starts. We keep one old log file."""
_LOGGER = logging.getLogger(__name__)


class Failures:
    """The failures of one run's record. Thread-safe."""

    def __init__(self, run_dir: Path, warn: Callable[[str], None] = _LOGGER.warning) -> None:
        """`warn`: called once per kind, on the thread of the failure. You may replace it later."""
        self.warn = warn
        self.counts = Counter[str]()
        """Failures by kind, including those of the run's earlier processes."""
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._file = run_dir / LOG_FILE
        handler = _Log(self._file, "a", LOG_BYTES, 1, "utf-8", True, "backslashreplace")
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._log = logging.Logger("record")
        self._log.addHandler(handler)

    def carry(self, earlier: Mapping[str, int]) -> None:
        """Add the counts of the run's earlier processes."""
        with self._lock:
            self.counts.update(earlier)

    @contextmanager
    def contained(self, what: str) -> Generator[None]:
        """Catch an error in the block and record it as a failure of kind `what`.

        `what`: a few words that are the same each time, for example "drawing a step".
        """
        try:
            yield
        except Exception as error:
            self.add(what, error)

    def add(self, what: str, error: Exception) -> None:
        with self._lock:
            self.counts[what] += 1
            is_first = what not in self._warned
            self._warned.add(what)
        self._log.error("%s failed", what, exc_info=error)
        if is_first:
            self.warn(
                f"{what} failed, the run goes on: {_line(error)}. Later failures of this kind are "
                f"counted; {self._file} has the tracebacks"
            )

    def close(self) -> None:
        """Close the log file. A later failure reopens it."""
        for handler in self._log.handlers:
            handler.close()


class _Log(RotatingFileHandler):
    """A log file that may miss lines on a full disk but never raises."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error: `Failures` has counted the failure itself and warned about it."""
        del record


def _line(error: Exception) -> str:
    """Return an error's type and first line, short enough for a terminal."""
    first = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    return f"{type(error).__name__}: {first}"[:300]
