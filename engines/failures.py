"""Failures of a run's record, which end no run.

The record is what people look at: metrics, pictures, pages, files of progress, copies of
checkpoints. Whoever writes to it does so within `Failures.contained`. Nothing is swallowed:

    contained ─► counted (summary.json, `refrain show`)
              ─► record.log in the run's directory: the traceback
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
"""Size at which a log is put aside; the one before it goes."""
_LOGGER = logging.getLogger(__name__)


class Failures:
    """Counts the failures of one run's record. Safe to share among threads."""

    def __init__(self, run_dir: Path, warn: Callable[[str], None] = _LOGGER.warning) -> None:
        """`warn`: called once a kind, on the thread of the failure; it may be replaced later."""
        self.warn = warn
        self.counts = Counter[str]()
        """Failures by kind, those of the run's earlier processes included."""
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._file = run_dir / LOG_FILE
        handler = _Log(self._file, "a", LOG_BYTES, 1, "utf-8", True, "backslashreplace")
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._log = logging.Logger("record")
        self._log.addHandler(handler)

    def carry(self, earlier: Mapping[str, int]) -> None:
        """Count the failures of the run's earlier processes too."""
        with self._lock:
            self.counts.update(earlier)

    @contextmanager
    def contained(self, what: str) -> Generator[None]:
        """Turn an error into a failure of this kind. `what` it is that failed, in a few words that
        are the same every time."""
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
        """Close the log; a later failure opens it again."""
        for handler in self._log.handlers:
            handler.close()


class _Log(RotatingFileHandler):
    """A log that a full disk makes incomplete, and nothing more."""

    def handleError(self, record: logging.LogRecord) -> None:
        """The failure itself is counted and warned of."""
        del record


def _line(error: Exception) -> str:
    """An error's first line, short enough for a terminal."""
    first = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    return f"{type(error).__name__}: {first}"[:300]
