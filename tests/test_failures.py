"""Record failures are counted and logged, warned of once a kind, and end nothing."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from refrain.engines.failures import LOG_BYTES, LOG_FILE, Failures
from refrain.engines.reports.progress import Everywhere, TerminalProgress
from refrain.engines.reports.runs import RunRecord, print_run
from refrain.schemas.progress import RunProgress
from tests.failing_disks import full_disk
from tests.flows.run_dirs import progress


def fail(failures: Failures, what: str, text: str = "no\nroom") -> None:
    with failures.contained(what):
        raise OSError(text)


def test_each_is_counted_and_each_kind_is_warned_of_once(
    tmp_path: Path, record_failures: list
) -> None:
    said: list[str] = []
    failures = Failures(tmp_path, said.append)
    failures.carry({"pictures": 2})
    for what in ("pictures", "pages", "pictures"):
        fail(failures, what)
    assert failures.counts == {"pictures": 4, "pages": 1}
    assert [text.partition(" failed, the run goes on: OSError: no.")[0] for text in said] == [
        "pictures",
        "pages",
    ]
    log = (tmp_path / LOG_FILE).read_text()
    assert log.count("Traceback (most recent call last)") == 3
    assert log.count("pictures failed") == 2
    assert [what for what, _ in record_failures] == ["pictures", "pages", "pictures"]
    record_failures.clear()


def test_keyboard_interrupt_is_not_contained(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Failures(tmp_path).contained("pictures"):
        raise KeyboardInterrupt


def test_the_log_needs_no_room_and_does_not_grow_for_ever(
    tmp_path: Path, record_failures: list, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = Failures(tmp_path, lambda _: None)
    with full_disk():
        fail(failures, "pictures")
    for _ in range(5):
        fail(failures, "pages", "\ud800" + "x" * (LOG_BYTES // 2))
    assert failures.counts["pages"] == 5
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 3 * LOG_BYTES
    assert capsys.readouterr() == ("", "")
    record_failures.clear()


def test_a_terminal_that_was_closed_ends_nothing(tmp_path: Path, record_failures: list) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError("Input/output error")

    failures = Failures(tmp_path)
    shown = Everywhere(failures, TerminalProgress(Console(file=Closed())))
    failures.warn = shown.warn
    shown.phase("training")
    shown.warn("so so")
    assert failures.counts == {"showing progress": len(record_failures)}
    record_failures.clear()


def test_a_text_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A text may be a path in brackets or the answer of a server."""
    shown = TerminalProgress()
    shown.phase("[/tmp] is full")
    shown.warn("\x1b[2J[/b] failed")
    assert capsys.readouterr().out == "[/tmp] is full\n\\x1b[2J[/b] failed\n"


def test_a_run_shows_them(tmp_path: Path) -> None:
    now: RunProgress = progress().model_copy(update={"failures": {"drawing a step": 3}})
    record = RunRecord(tmp_path, False, None, now, None, [], None, None, 0.0)
    written = io.StringIO()
    print_run(record, Console(file=written, width=200), 0.0, None)
    assert f"drawing a step: 3 ({tmp_path / LOG_FILE})" in written.getvalue()
