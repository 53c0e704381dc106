"""A run's progress in two small files, for other processes to read while the run holds its store.

    progress.json     replaced at most once a second
    steps.jsonl       one line per step

The files are for users: a resumed run does not read its state from them. On a full disk they stay
unchanged until there is space again.
"""

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from refrain.engines.durable import disk_full, write_durably
from refrain.engines.failures import Failures
from refrain.engines.user_files import read_bytes, readable_lines
from refrain.schemas.progress import Ending, Rolling, RunProgress
from refrain.schemas.step import StepReport

PROGRESS_FILE = "progress.json"
STEPS_FILE = "steps.jsonl"
WRITE_EVERY_S = 1.0


class ProgressFile:
    """Writes the progress of one process of a run, as a context manager."""

    def __init__(self, run_dir: Path, num_steps: int, failures: Failures | None = None) -> None:
        now_s = time.time()
        before = read_progress(run_dir)
        self._run_dir = run_dir
        self._failures = failures or Failures(run_dir)
        self._failures.carry(before.failures if before else {})
        self._unwritten: list[StepReport] = []
        self._progress = RunProgress(
            num_steps=num_steps,
            first_started_s=before.first_started_s if before else now_s,
            started_s=now_s,
            earlier_s=before.wall_s if before else 0.0,
            updated_s=now_s,
        )
        self._changed = threading.Event()
        self._left = threading.Event()
        self._writing = threading.Lock()
        """Held while `progress.json` is written, because both threads use the same temporary file.
        """
        self._writer = threading.Thread(target=self._keep_writing, name="progress", daemon=True)

    def __enter__(self) -> "ProgressFile":
        self._write_steps()
        self._write()
        self._writer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._left.set()
        self._changed.set()
        self._writer.join()
        failed = isinstance(error, Exception)
        ending = Ending.FAILED if failed else Ending.STOPPED if kind else Ending.FINISHED
        self._change(ending=ending, rolling=None, error=str(error) if failed else None)
        self._write_steps()
        self._write()

    def begin(self, policy_version: int) -> None:
        """Delete reports of steps after `policy_version`, because the run repeats these steps."""
        with self._failures.contained(f"writing {STEPS_FILE}"):
            readable, _ = readable_steps(self._run_dir)
            write_steps(self._run_dir, [one for one in readable if one.step <= policy_version])

    def phase(self, text: str) -> None:
        self._change(phase=text, rolling=None)

    def warn(self, text: str) -> None:
        self._change(phase=text)

    def rolling(self, rolling: Rolling) -> None:
        self._change(rolling=rolling)

    def step(self, report: StepReport, num_steps: int) -> None:
        assert num_steps == self._progress.num_steps
        self._unwritten.append(report)
        self._write_steps()

    def _change(self, **values: Any) -> None:
        self._progress = self._progress.model_copy(update=values)
        self._changed.set()

    def _keep_writing(self) -> None:
        while not self._left.is_set():
            self._changed.wait()
            self._changed.clear()
            self._write()
            self._left.wait(WRITE_EVERY_S)

    def _write(self) -> None:
        with self._writing, self._failures.contained(f"writing {PROGRESS_FILE}"):
            now = {"updated_s": time.time(), "failures": dict(self._failures.counts)}
            text = self._progress.model_copy(update=now).model_dump_json(indent=2)
            write_durably(self._run_dir / PROGRESS_FILE, text + "\n")

    def _write_steps(self) -> None:
        """Append the unwritten reports, as whole lines only."""
        with self._failures.contained(f"writing {STEPS_FILE}"):
            lines = _lines(self._unwritten).encode()
            with (self._run_dir / STEPS_FILE).open("ab", buffering=0) as file:
                size = file.tell()
                if (num_bytes := file.write(lines)) < len(lines):
                    file.truncate(size)
                    raise disk_full(self._run_dir, STEPS_FILE, len(lines), num_bytes)
            self._unwritten.clear()


def read_progress(run_dir: Path) -> RunProgress | None:
    """Return a run's progress, or None if the file is missing or this version cannot read it."""
    try:
        return RunProgress.model_validate_json(read_bytes(run_dir / PROGRESS_FILE))
    except ValueError:
        return None


def readable_steps(run_dir: Path) -> tuple[list[StepReport], list[str]]:
    """Return the reports of steps in order, and what is wrong with damaged lines.

    Of a repeated step, the last report counts. An unfinished last line is skipped: the run is
    writing it, or crashed while it did.
    """
    reports, wrong = readable_lines(run_dir / STEPS_FILE, StepReport, appended=True)
    last = {report.step: report for report in reports}
    return [last[step] for step in sorted(last)], wrong


def write_steps(run_dir: Path, reports: Iterable[StepReport]) -> None:
    """Replace the file's reports by these."""
    write_durably(run_dir / STEPS_FILE, _lines(reports))


def _lines(reports: Iterable[StepReport]) -> str:
    return "".join(report.model_dump_json() + "\n" for report in reports)
