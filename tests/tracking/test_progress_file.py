"""The progress that a run writes to disk for `refrain` commands that watch it."""

import time
from pathlib import Path

import pytest

from refrain.engines.failures import Failures
from refrain.engines.tracking import progress_file
from refrain.engines.tracking.progress_file import (
    PROGRESS_FILE,
    STEPS_FILE,
    WRITE_EVERY_S,
    ProgressFile,
    read_progress,
    readable_steps,
)
from refrain.schemas.progress import Ending
from refrain.schemas.step import StepReport
from tests.failing_disks import full_disk
from tests.flows.run_dirs import ROLLING, report


def read_steps(run_dir: Path) -> list[StepReport]:
    reports, wrong = readable_steps(run_dir)
    assert wrong == []
    return reports


def test_the_ending_is_written(tmp_path: Path) -> None:
    with ProgressFile(tmp_path, 4):
        going_on = read_progress(tmp_path)
    finished = read_progress(tmp_path)
    with pytest.raises(RuntimeError), ProgressFile(tmp_path, 4):
        raise RuntimeError("engine 1 died")
    failed = read_progress(tmp_path)
    with pytest.raises(KeyboardInterrupt), ProgressFile(tmp_path, 4):
        raise KeyboardInterrupt
    stopped = read_progress(tmp_path)
    assert going_on
    assert finished
    assert failed
    assert stopped
    endings = [p.ending for p in (going_on, finished, failed, stopped)]
    assert endings == [None, Ending.FINISHED, Ending.FAILED, Ending.STOPPED]
    assert (failed.error, stopped.error) == ("engine 1 died", None)


def test_progress_is_written_promptly_but_not_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    write = progress_file.write_durably
    monkeypatch.setattr(
        progress_file, "write_durably", lambda *args: (written.append(args), write(*args))
    )
    with ProgressFile(tmp_path, 4) as file:
        file.phase("step 1: training")
        for _ in range(50):
            file.rolling(ROLLING)
            time.sleep(0.005)
        deadline = time.monotonic() + 5.0 * WRITE_EVERY_S
        while (found := read_progress(tmp_path)) is None or found.rolling is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert (found.phase, found.rolling) == ("step 1: training", ROLLING)
        assert len(written) <= 3


def test_times_add_up_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("refrain.engines.tracking.progress_file.time.time", lambda: now_s)
    with ProgressFile(tmp_path, 4):
        now_s = 1060.0
    now_s = 5000.0
    with ProgressFile(tmp_path, 4):
        now_s = 5005.0
    progress = read_progress(tmp_path)
    assert progress
    assert (progress.first_started_s, progress.started_s) == (1000.0, 5000.0)
    assert progress.wall_s == 65.0


def test_a_clock_that_is_set_back_stops_no_later_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    with ProgressFile(tmp_path, 4):
        now_s -= 3600.0
    with ProgressFile(tmp_path, 4):
        found = read_progress(tmp_path)
        assert found is not None
        assert (found.earlier_s, found.wall_by(now_s - 60.0)) == (0.0, 0.0)


def test_steps_that_will_be_done_again_are_forgotten(tmp_path: Path) -> None:
    with ProgressFile(tmp_path, 4) as file:
        for step in (1, 2, 3):
            file.step(report(step, 0.5), 4)
    with ProgressFile(tmp_path, 4) as file:
        file.begin(2)
        assert [step.step for step in read_steps(tmp_path)] == [1, 2]
        file.step(report(3, 0.75), 4)
    assert [step.reward_mean for step in read_steps(tmp_path)] == [0.5, 0.5, 0.75]


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    with ProgressFile(tmp_path, 4) as file:
        file.step(report(1, 0.5), 4)
    with (tmp_path / STEPS_FILE).open("a") as steps:
        steps.write(report(2, 0.5).model_dump_json()[:40])
    assert [step.step for step in read_steps(tmp_path)] == [1]


def test_unreadable_progress_is_none(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    (tmp_path / PROGRESS_FILE).write_text("{")
    assert read_progress(tmp_path) is None


def test_a_full_disk_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_failures: list
) -> None:
    """The thread goes on when there is room again, and no reported step is lost."""
    monkeypatch.setattr(progress_file, "WRITE_EVERY_S", 0.01)
    said: list[str] = []
    with ProgressFile(tmp_path, 4, Failures(tmp_path, said.append)) as file:
        file.step(report(1, 0.25), 4)
        with full_disk(room=(tmp_path / STEPS_FILE).stat().st_size + 10):
            file.step(report(2, 0.5), 4)
            for text in ("rolling out" * 100, "training" * 100):
                file.phase(text)
                file._write()
        assert [step.step for step in read_steps(tmp_path)] == [1]
        file.step(report(3, 0.75), 4)
        assert [step.reward_mean for step in read_steps(tmp_path)] == [0.25, 0.5, 0.75]
        file.phase("there is room")
        deadline = time.monotonic() + 10.0
        while (found := read_progress(tmp_path)) is None or found.phase != "there is room":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert file._writer.is_alive()
    assert {what for what, _ in record_failures} == {"writing steps.jsonl", "writing progress.json"}
    record_failures.clear()
    assert len(said) == 2, "each kind of failure must be reported once"
    failed = read_progress(tmp_path)
    assert failed
    assert failed.failures["writing steps.jsonl"] == 1
    with ProgressFile(tmp_path, 4, Failures(tmp_path)):
        pass
    assert (read_progress(tmp_path) or failed).failures["writing steps.jsonl"] == 1
