"""`refrain runs` and `refrain show` on the directories of runs."""

import fcntl
import re
import threading
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner
from filelock import FileLock

from refrain.engines.reports.runs import RunState
from refrain.engines.rollout.interface import EngineDied
from refrain.engines.tracking.progress_file import STEPS_FILE, ProgressFile
from refrain.flows.cli import main
from refrain.schemas.progress import Ending
from refrain.tasks.run.crashes import CRASHES_FILE, note_crash
from refrain.tasks.run.find import find_run
from refrain.tasks.run.ray_cluster import RayDied
from refrain.tasks.run.record import read_run
from refrain.tasks.run.run_dir import (
    CONFIG_FILE,
    LOCK_FILE,
    SUMMARY_FILE,
    claim_run_dir,
    is_live,
)
from tests.flows.run_dirs import ROLLING, make_checkpoint, make_run, progress, report, summary

WIDE = {"COLUMNS": "200"}


def refrain(*args: str | Path) -> str:
    done = CliRunner().invoke(main, [*map(str, args)], env=WIDE)
    assert done.exit_code == 0, done.output
    return done.output


def row_of(table: str, name: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"{name} ")]
    return re.split(r" {2,}", line.strip())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a directory with a run in each state, and with folders that are not runs."""
    runs = tmp_path / "runs"
    make_run(runs, "killed", (0.5, 0.625), progress(rolling=ROLLING, started_s=1e9))
    make_run(runs, "done", (0.5, 0.5, 0.75, 0.875), progress(Ending.FINISHED), summary(4))
    make_run(runs, "broken", (0.5,), progress(Ending.FAILED, error="engine 1 died"))
    make_run(runs, "interrupted", (), progress(Ending.STOPPED))
    (runs / ".prefect").mkdir()
    (runs / "simulations").mkdir()
    return runs


def test_table_lists_all_runs(runs: Path) -> None:
    table = refrain("runs", "--runs-dir", runs)
    assert table.splitlines()[1].startswith("killed"), "the oldest run is not first"
    assert row_of(table, "killed")[:6] == [
        *("killed", "0", "stopped, resumable", "2/4", "2", "0.625"),
    ]
    assert row_of(table, "killed")[-1] == "00:01:10"
    assert row_of(table, "done")[2:6] == ["finished", "4/4", "2", "0.875"]
    assert row_of(table, "broken")[2] == "failed"
    assert row_of(table, "interrupted")[3:6] == ["0/4", "2", "-"]


def test_live_run_is_running_despite_earlier_summaries(runs: Path) -> None:
    for name in ("killed", "done", "broken"):
        with FileLock(runs / name / LOCK_FILE):
            assert is_live(runs / name)
            assert read_run(runs / name).state is RunState.RUNNING
        assert not is_live(runs / name)


def test_wall_time_of_a_live_run_grows(runs: Path) -> None:
    with FileLock(runs / "killed" / LOCK_FILE):
        assert read_run(runs / "killed").wall_s(1e9 + 25.0) == 85.0
    assert read_run(runs / "killed").wall_s(1e9 + 25.0) == 70.0


def test_looking_keeps_no_run_from_starting(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "resumed")
    config = read_run(run_dir).config
    assert config is not None
    (run_dir / LOCK_FILE).touch()
    with (run_dir / LOCK_FILE).open() as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (looked_at, fcntl.LOCK_UN)).start()
        claim_run_dir(config, resume=True).release()


def test_damaged_summary_is_reported_and_hides_nothing(runs: Path) -> None:
    (runs / "done" / SUMMARY_FILE).write_text('{"steps": 4,')
    table = refrain("runs", "--runs-dir", runs)
    assert row_of(table, "done")[2:4] == ["finished", "4/4"]
    assert "summary.json is damaged" in table
    make_run(runs, "older", (0.5,))
    (runs / "older" / SUMMARY_FILE).write_text("")
    assert read_run(runs / "older").state is RunState.STOPPED


def test_config_of_another_version_is_reported(runs: Path) -> None:
    (runs / "done" / CONFIG_FILE).write_text('{"name": "done", "dragon": 1}')
    (runs / "killed" / CONFIG_FILE).write_text("{")
    table = refrain("runs", "--runs-dir", runs)
    assert row_of(table, "done")[1:3] == ["?", "finished"]
    assert row_of(table, "killed")[1:3] == ["?", "stopped, resumable"]
    assert "model: Field required" in table
    assert "config.json cannot be read by this version" in refrain(
        "show", "killed", "--runs-dir", runs
    )


def test_a_run_that_does_not_exist_lists_those_that_do(runs: Path) -> None:
    done = CliRunner().invoke(main, ["show", "dmeo", "--runs-dir", str(runs)])
    assert done.exit_code == 2
    assert "no run 'dmeo'" in done.output
    assert "broken, done, interrupted, killed" in done.output
    with pytest.raises(ValueError, match="there is none yet"):
        find_run("dmeo", runs / "simulations")
    assert find_run(str(runs / "done"), Path("elsewhere")) == runs / "done"


def test_no_runs_yet(tmp_path: Path) -> None:
    assert "no run in" in refrain("runs", "--runs-dir", tmp_path)
    done = CliRunner().invoke(main, ["runs", "--runs-dir", str(tmp_path / "none")])
    assert (done.exit_code, "--runs-dir" in done.output) == (2, True)


def test_show_prints_one_run_in_full(runs: Path) -> None:
    make_checkpoint(runs / "killed", 2)
    shown = refrain("show", "killed", "--runs-dir", runs)
    assert "killed: stopped, resumable" in shown
    assert row_of(shown, "   2")[1:] == [
        *("0", "0.625", "47.0", "1,234", "80%", "4.5", "25%"),
        *("0.5", "3.0", "0.2", "6.0", "10.0"),
    ]
    assert "reward  0.500 ▁█ 0.625" in shown
    assert "checkpoints/global_step_2" in shown
    assert f"go on: refrain train --resume {runs / 'killed'}" in shown
    broken = refrain("show", "broken", "--runs-dir", runs)
    assert "it failed with: engine 1 died" in broken
    done = refrain("show", "done", "--runs-dir", runs)
    assert "0.250 -> 0.500" in done
    assert "--resume" not in done


def test_crashes_that_a_run_went_on_after_are_shown(runs: Path) -> None:
    note_crash(runs / "killed", RayDied("its raylet was killed\nand more"), num_left=2)
    shown = refrain("show", "killed", "--runs-dir", runs)
    step = read_run(runs / "killed").last_step
    told = f"after step {step}: RayDied: its raylet was killed (20"
    assert row_of(shown, "crashed")[1].startswith(told)
    (runs / "killed" / CRASHES_FILE).write_text("{")
    assert CRASHES_FILE in refrain("show", "killed", "--runs-dir", runs)


def test_changes_on_resume_are_shown(runs: Path) -> None:
    config = read_run(runs / "killed").config
    assert config is not None
    rollout = config.rollout.model_copy(update={"num_engines": 3})
    claim_run_dir(config.model_copy(update={"rollout": rollout}), resume=True).release()
    shown = refrain("show", "killed", "--runs-dir", runs)
    assert row_of(shown, "resumed with")[1].startswith("rollout.num_engines: 1 -> 3 (20")


def test_the_last_steps_of_a_long_run(tmp_path: Path) -> None:
    make_run(tmp_path, "long", tuple(0.01 * i for i in range(1, 31)))
    short, whole = (refrain("show", "long", "--runs-dir", tmp_path, *o) for o in ([], ["--all"]))
    assert "the last 20 of 30 steps" in short
    assert [row_of(table, "  11")[2] for table in (short, whole)] == ["0.110", "0.110"]
    assert "0.100" not in short
    assert "0.100" in whole


def test_following_a_run_line_by_line_over_a_crash_to_its_end(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "live", (0.5,))
    lock = FileLock(run_dir / LOCK_FILE)
    lock.acquire()
    file = ProgressFile(run_dir, num_steps=2)
    file.__enter__()
    looks = 0

    def next_second(_: float) -> None:
        """Advance the run while `refrain show` sleeps."""
        nonlocal looks, file
        looks += 1
        if looks == 1:
            file.phase("train step 2: rolling out")
            file._write()
        elif looks == 2:
            file.__exit__(EngineDied, EngineDied(1, "killed"), None)
            lock.release()
            note_crash(run_dir, EngineDied(1, "killed"), num_left=1)
        elif looks == 3:
            lock.acquire()
            file = ProgressFile(run_dir, num_steps=2)
            file.__enter__()
            file.step(report(2, 0.75), 2)
        elif looks == 4:
            file.__exit__(None, None, None)
            lock.release()

    with mock.patch("refrain.flows.runs.time.sleep", next_second):
        output = refrain("show", "live", "--runs-dir", tmp_path, "--follow")
    lines = output.splitlines()
    assert "train step 2: rolling out" in lines
    told = [line for line in lines if line.startswith("step    2/2")]
    assert len(told) == 1
    assert "reward 0.750" in told[0]
    assert "live: finished" in lines
    assert not any(line.startswith("step    1/2") for line in lines), "an old step is printed"


def test_following_what_has_ended_shows_it(runs: Path) -> None:
    assert "done: finished" in refrain("show", "done", "--runs-dir", runs, "--follow")


def test_steps_of_a_run_of_an_earlier_version_are_in_its_store(tmp_path: Path) -> None:
    from refrain.engines.store.store import Store

    run_dir = make_run(tmp_path, "old")
    (run_dir / STEPS_FILE).unlink()
    with Store(run_dir / "refrain.duckdb") as store:
        store.add_step(report(1, 0.5))
    record = read_run(run_dir)
    assert ([step.step for step in record.steps], record.num_steps) == ([1], None)
    assert "1/?" in refrain("runs", "--runs-dir", tmp_path)
