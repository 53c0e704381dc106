"""The run directory, when something goes wrong with it."""

import fcntl
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest

from refrain.benchmarks.timed_stubs import LocalStore
from refrain.engines.data.loader import PromptLoader
from refrain.engines.failures import Failures
from refrain.engines.learn.checkpoint import CheckpointState, write_checkpoint
from refrain.engines.learn.mirror import CopyTimeout, Mirror
from refrain.engines.store.rows import rollout_rows
from refrain.flows.config_file import load_config
from refrain.schemas.config import TrainConfig
from refrain.schemas.removed_settings import REMOVED, Removed
from refrain.schemas.resume import OnResume
from refrain.schemas.rollout import Split
from refrain.tasks.run.live import _fetch_lost, go_back
from refrain.tasks.run.record import list_runs
from refrain.tasks.run.resuming import Resumption, check_mirror
from refrain.tasks.run.run_dir import (
    CONFIG_FILE,
    check_run_dir,
    claim_run_dir,
    clear_up,
    delete_run,
    read_changes,
    read_config,
)
from tests.failing_disks import full_disk
from tests.flows.run_dirs import report
from tests.learn.test_checkpoint import write
from tests.store.test_store import make_rollout


def config(runs_dir: Path, **values) -> TrainConfig:
    given = {"model": {"path": "m"}, "data": {"train": ["d"]}, "runs_dir": runs_dir, "name": "it"}
    given["trainer"] = {"save_every_steps": 1}
    return TrainConfig.model_validate(given | values)


def claim_again(run_dir: Path) -> None:
    claim_run_dir(config(run_dir.parent), resume=True).release()


def test_failed_resume_on_full_disk_can_be_repeated(tmp_path):
    claim_run_dir(config(tmp_path), resume=False).release()
    with full_disk(), pytest.raises(OSError, match="No space left on device"):
        claim_run_dir(config(tmp_path), resume=True)
    assert read_config(tmp_path / "it") == config(tmp_path)
    claim_run_dir(config(tmp_path), resume=True).release()


def test_changes_on_resume_are_recorded(tmp_path):
    claim_run_dir(config(tmp_path), resume=False).release()
    for fewer in (3, 2, 2):
        claim_run_dir(config(tmp_path, rollout={"num_engines": fewer}), resume=True).release()
    changes = read_changes(tmp_path / "it")
    assert [(c.name, c.before, c.after) for c in changes] == [
        ("rollout.num_engines", 1, 3),
        ("rollout.num_engines", 3, 2),
    ]
    assert changes[0].at_s > 1e9
    with pytest.raises(ValueError, match="Different:\n  seed: 0 -> 1"):
        claim_run_dir(config(tmp_path, seed=1), resume=True)
    assert read_config(tmp_path / "it").rollout.num_engines == 2
    assert len(read_changes(tmp_path / "it")) == 2


def test_a_run_does_not_take_anothers_copies_for_its_own(tmp_path):
    copies = {"trainer": {"checkpoint_url": (tmp_path / "copies").as_uri()}}
    claim_run_dir(config(tmp_path), resume=False).release()
    moved = config(tmp_path, **copies)
    changes = check_run_dir(moved, resume=True)
    check_mirror(moved, True, changes)
    Mirror(copies["trainer"]["checkpoint_url"], "it").put(write(tmp_path / "another", 3), keep=1)
    with pytest.raises(ValueError, match="has step 3 of another run it"):
        check_mirror(moved, True, changes)
    check_mirror(moved, True, [])


@pytest.mark.parametrize("why", ["unreachable", "silent"])
def test_a_place_of_copies_that_does_not_answer_ends_no_run(
    tmp_path, monkeypatch, record_failures, why
):
    """A new run is refused with a clear error. A run with its own checkpoint goes on."""
    copies = config(tmp_path, trainer={"checkpoint_url": (tmp_path / "copies").as_uri()})
    end = threading.Event()

    def steps(_):
        if why == "silent":
            end.wait(60.0)
        raise OSError("Connection refused")

    monkeypatch.setattr(Mirror, "steps", steps)
    for limit in ("refrain.tasks.run.resuming.ANSWER_S", "refrain.tasks.run.live.FETCH_S"):
        monkeypatch.setattr(limit, 0.05)
    with pytest.raises(ValueError, match=r"checkpoint_url: file:///.*check the address"):
        check_mirror(copies, False, [])
    failures = Failures(copies.run_dir, lambda _: None)
    with pytest.raises((OSError, CopyTimeout)):
        _fetch_lost(copies, Resumption(None, {}, ()), failures)
    assert not record_failures
    own = write(tmp_path / "own", 3)
    assert _fetch_lost(copies, Resumption(own, {}, ()), failures) == own
    assert [what for what, _ in record_failures] == ["fetching a checkpoint's copy"]
    record_failures.clear()
    end.set()


def test_another_key_to_the_same_place_is_no_move(tmp_path):
    def with_key(key):
        url = f"s3://user:{key}@bucket/folder?endpoint_override=localhost:9"
        return config(tmp_path, trainer={"checkpoint_url": url})

    claim_run_dir(with_key("old"), resume=False).release()
    changes = check_run_dir(with_key("new"), resume=True)
    assert [change.name for change in changes] == ["trainer.checkpoint_url"]
    # If this were a move, `check_mirror` would look there for copies of another run, and fail.
    check_mirror(with_key("new"), True, changes)


@pytest.mark.parametrize("begin", [claim_again, clear_up, delete_run])
def test_processes_of_a_killed_driver_end_first(tmp_path, begin):
    claim_run_dir(config(tmp_path), resume=False).release()
    environment = os.environ | {"REFRAIN_RUN_DIR": str(tmp_path / "it")}
    # The shell ends at once and leaves an orphan.
    script = "sleep 600 >/dev/null 2>&1 & echo $!"
    told = subprocess.run(["sh", "-c", script], env=environment, stdout=subprocess.PIPE, check=True)
    left = psutil.Process(int(told.stdout))
    try:
        begin(tmp_path / "it")
        psutil.wait_procs([left], timeout=10)
        assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    finally:
        if left.is_running():
            left.kill()


@pytest.mark.parametrize("pid", ["12 clears up", "12"])
def test_driver_waits_for_the_cleaner_of_another(tmp_path, pid):
    """The cleaner of a killed run holds the lock for a few seconds; a live run keeps it."""
    claim_run_dir(config(tmp_path), resume=False).release()
    other = (tmp_path / "it" / ".lock").open()
    fcntl.flock(other, fcntl.LOCK_EX)
    (tmp_path / "it" / "pid").write_text(pid)
    release = threading.Timer(1.5, other.close)
    release.start()
    begun = time.monotonic()
    if pid == "12":
        with pytest.raises(ValueError, match="used by a live run"):
            claim_run_dir(config(tmp_path), resume=True)
    else:
        claim_run_dir(config(tmp_path), resume=True).release()
        assert time.monotonic() - begun > 1.0
    release.join()


async def test_a_store_goes_back_to_the_checkpoint(tmp_path):
    loader = PromptLoader(["a"], prompts_per_step=1, num_epochs=3, shuffle=True, seed=0)
    store = LocalStore(tmp_path / "refrain.duckdb")
    state = CheckpointState(step=1, policy_version=1, loader_state=loader.state(1))
    checkpoint = write_checkpoint(tmp_path, state, lambda _: None)
    for step in (1, 2, 3):
        await store.call("add_rollouts", rollout_rows([make_rollout(step)]), 0)
        await store.call("add_step", report(step, 0.5))
    assert await go_back(checkpoint, loader, store, 0) == 1
    assert await store.call("last_step") == 1
    rows = [(await store.call("rollouts", Split.TRAIN, step)).num_rows for step in (1, 2, 3)]
    assert rows == [1, 1, 0]
    assert await go_back(None, loader, store, 0) == 0
    assert await store.call("last_step") is None
    other = PromptLoader(["b"], prompts_per_step=1, num_epochs=3, shuffle=True, seed=0)
    with pytest.raises(ValueError, match="the checkpoint of step 1 was made with"):
        await go_back(checkpoint, other, store, 0)


def test_half_deleted_run_cannot_be_resumed(tmp_path, monkeypatch):
    claim_run_dir(config(tmp_path), resume=False).release()
    (tmp_path / "it" / "refrain.duckdb").write_text("rollouts of another seed")
    delete = shutil.rmtree

    def killed(path: Path, **_: bool) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        delete_run(tmp_path / "it")
    monkeypatch.setattr(shutil, "rmtree", delete)
    assert not (tmp_path / "it").exists()
    assert list_runs(tmp_path) == []
    claim_run_dir(config(tmp_path, seed=1), resume=False).release()
    assert not (tmp_path / "it" / "refrain.duckdb").exists()
    delete_run(tmp_path / "it")
    assert list(tmp_path.iterdir()) == []


def test_directory_without_config_is_not_claimed(tmp_path):
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "refrain.duckdb").touch()
    with pytest.raises(ValueError, match=r"it has refrain\.duckdb, but no config\.json"):
        claim_run_dir(config(tmp_path), resume=False)
    assert not (tmp_path / "it" / CONFIG_FILE).exists()


def test_of_a_directory_of_indexes_only_indexes_are_deleted(tmp_path):
    elsewhere = tmp_path / "data"
    given = config(tmp_path / "runs", drafting={"index_dir": elsewhere})
    claim_run_dir(given, resume=False).release()
    given.history_dir.mkdir(parents=True)
    for name in ("a.index", "b.index.7.tmp", "thesis.tex"):
        (given.history_dir / name).touch()
    delete_run(given.run_dir)
    assert [path.name for path in given.history_dir.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("value", [None, "old"])
def test_a_run_with_a_removed_setting_resumes_and_reports_its_value(tmp_path, value):
    """Only a value that differs from what runs have now is a change."""
    claim_run_dir(config(tmp_path), resume=False).release()
    file = tmp_path / "it" / CONFIG_FILE
    recorded = json.loads(file.read_text())
    recorded["drafting"]["profile"] = value
    file.write_text(json.dumps(recorded))
    assert read_config(tmp_path / "it") == config(tmp_path)
    assert load_config(file).drafting == config(tmp_path).drafting
    changes = [str(change) for change in check_run_dir(config(tmp_path), resume=True)]
    assert changes == (["drafting.profile: 'old' -> None"] if value else [])
    claim_again(tmp_path / "it")
    assert "profile" not in json.loads(file.read_text())["drafting"]
    assert check_run_dir(config(tmp_path), resume=True) == []


def test_a_removed_setting_that_decides_on_tokens_ends_a_resume(tmp_path, monkeypatch):
    kept = Removed(1.1, "refrain measures it", OnResume.KEPT)
    claim_run_dir(config(tmp_path), resume=False).release()
    file = tmp_path / "it" / CONFIG_FILE
    recorded = json.loads(file.read_text())
    monkeypatch.setitem(REMOVED, "histopipe.growth", kept)
    for growth in (1.1, 2.0):
        recorded["histopipe"]["growth"] = growth
        file.write_text(json.dumps(recorded))
        if growth == 1.1:
            assert check_run_dir(config(tmp_path), resume=True) == []
    with pytest.raises(ValueError, match=r"histopipe\.growth: 2\.0 -> 1\.1"):
        check_run_dir(config(tmp_path), resume=True)
