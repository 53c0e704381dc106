"""Copies of checkpoints in an object store. Here the store is a local directory."""

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from refrain.engines.failures import Failures
from refrain.engines.learn.checkpoint import (
    CheckpointState,
    latest_checkpoint,
    prune_checkpoints,
    read_state,
)
from refrain.engines.learn.mirror import MAX_LEFT, CheckpointCopies, Mirror
from tests.flows.directory_snapshots import tree
from tests.learn.test_checkpoint import flip, write


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror((tmp_path / "bucket").as_uri(), "demo")


def test_a_lost_checkpoint_comes_back(mirror: Mirror, tmp_path: Path) -> None:
    own = write(tmp_path / "own", 10)
    state = read_state(own)
    mirror.put(own, keep=2)
    shutil.rmtree(tmp_path / "own")
    assert mirror.fetch_newer(tmp_path / "own") == own
    assert read_state(own) == state
    assert (own / "model" / "file").read_text() == "weights"


def test_the_newest_wins_wherever_it_is(mirror: Mirror, tmp_path: Path) -> None:
    own = tmp_path / "own"
    for step in (9, 10):
        mirror.put(write(own, step), keep=2)
    assert mirror.fetch_newer(own) is None
    shutil.rmtree(own / "global_step_10")
    assert mirror.fetch_newer(own) == own / "global_step_10"
    write(own, 11)
    assert mirror.fetch_newer(own) is None
    assert latest_checkpoint(own) == own / "global_step_11"


def test_copies_beyond_those_kept_are_removed(mirror: Mirror, tmp_path: Path) -> None:
    for step in (2, 9, 10):
        mirror.put(write(tmp_path / "own", step), keep=2)
        prune_checkpoints(tmp_path / "own", 1)
    assert mirror.steps() == [9, 10]
    assert {path.name for path in (tmp_path / "bucket" / "demo").iterdir()} == {
        "global_step_9",
        "global_step_10",
    }


def test_a_copy_that_was_cut_off_is_not_one(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.put(write(tmp_path / "own", 1), keep=2)
    copied: list[Path] = []

    def copy_one(file: Path, _: object) -> None:
        copied.append(file)
        if len(copied) > 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(mirror, "_copy_out", copy_one)
    with pytest.raises(KeyboardInterrupt):
        mirror.put(write(tmp_path / "own", 2), keep=2)
    assert [file.name for file in copied] == ["file", "state.json"]
    assert mirror.steps() == [1]


def test_a_damaged_copy_is_named_and_leaves_nothing(mirror: Mirror, tmp_path: Path) -> None:
    mirror.put(write(tmp_path / "own", 3), keep=2)
    shutil.rmtree(tmp_path / "own")
    (tmp_path / "bucket" / "demo" / "global_step_3" / "model" / "file").write_text("wei")
    with pytest.raises(ValueError, match=r"size of .*global_step_3/model/file is not the 7 bytes"):
        mirror.fetch_newer(tmp_path / "own")
    assert latest_checkpoint(tmp_path / "own") is None


def test_flipped_bits_are_detected_and_refetched(mirror: Mirror, tmp_path: Path) -> None:
    own = write(tmp_path / "own", 3)
    mirror.put(own, keep=2)
    flip(own / "model" / "file", 5)
    assert mirror.fetch_newer(tmp_path / "own") == own
    assert (own / "model" / "file").read_text() == "weights"
    flip(tmp_path / "bucket" / "demo" / "global_step_3" / "model" / "file", 5)
    shutil.rmtree(own)
    with pytest.raises(ValueError, match=r"global_step_3/model/file is damaged: its SHA-256"):
        mirror.fetch_newer(tmp_path / "own")


@pytest.mark.parametrize("name", ["../../../x", "/tmp/x", "model/../../../x"])
def test_a_copy_writes_nothing_elsewhere(mirror: Mirror, tmp_path: Path, name: str) -> None:
    mirror.put(write(tmp_path / "own", 3), keep=2)
    shutil.rmtree(tmp_path / "own")
    (tmp_path / "own").mkdir()
    file = tmp_path / "bucket" / "demo" / "global_step_3" / "state.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps(state | {"file_bytes": {name: 4}}))
    before = tree(tmp_path)
    with pytest.raises(
        ValueError, match=r"state\.json is damaged .*is not the path of a file in this"
    ):
        mirror.fetch_newer(tmp_path / "own")
    file.write_text(CheckpointState(**state | {"step": 2}).sealed().model_dump_json())
    with pytest.raises(ValueError, match="belongs to step 2"):
        mirror.fetch_newer(tmp_path / "own")
    assert tree(tmp_path).keys() == before.keys()


def test_runs_do_not_see_each_others_copies(mirror: Mirror, tmp_path: Path) -> None:
    mirror.put(write(tmp_path / "own", 3), keep=2)
    assert Mirror((tmp_path / "bucket").as_uri(), "other").steps() == []


def test_an_unknown_url_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.checkpoint_url: ftp://x .*s3://bucket"):
        Mirror("ftp://x", "demo")


def test_a_step_that_is_done_again_is_copied_again(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If copying stops while it replaces an older copy, neither copy counts."""
    own = write(tmp_path / "own", 1)
    mirror.put(own, keep=2)
    state = read_state(own)
    again = state.model_copy(update={"loader_state": {"seed": 2}}).sealed()
    (own / "state.json").write_text(again.model_dump_json())
    with monkeypatch.context() as cut:
        cut.setattr(mirror, "_copy_out", _input_output_error)
        with pytest.raises(OSError, match="Input/output"):
            mirror.put(own, keep=2)
    assert mirror.steps() == []
    mirror.put(own, keep=2)
    assert mirror._state(1) == again
    monkeypatch.setattr(mirror, "_copy_out", _input_output_error)
    mirror.put(own, keep=2)  # The copy is complete, so nothing is copied.


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "FIRST_PAUSE_S", "COPY_S"):
        monkeypatch.setattr(f"refrain.engines.learn.mirror.{name}", 0.02)


@pytest.mark.usefixtures("quick")
def test_copies_are_made_beside_the_run(mirror: Mirror, tmp_path: Path) -> None:
    own = tmp_path / "own"
    write(own, 1)  # A checkpoint of an earlier process.
    copies = CheckpointCopies(mirror, own, 2, Failures(tmp_path))
    for step in (2, 3):
        write(own, step)
    wait_until(lambda: mirror.steps() == [2, 3])
    copies.close()
    assert copies.missing() == []


@pytest.mark.usefixtures("quick")
def test_a_copy_that_fails_is_tried_again(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_failures: list
) -> None:
    own, said = tmp_path / "own", []
    copies = CheckpointCopies(mirror, own, 2, Failures(tmp_path, said.append))
    with monkeypatch.context() as broken:
        broken.setattr(mirror, "_copy_out", _input_output_error)
        write(own, 1)
        wait_until(lambda: len(record_failures) >= 2)
        (sentence,) = copies.missing()
        assert "global_step_1 not copied to file:///" in sentence
    wait_until(lambda: mirror.steps() == [1])
    copies.close()
    assert copies.missing() == []
    assert {what for what, _ in record_failures} == {"copying a checkpoint"}
    assert len(said) == 1
    record_failures.clear()


@pytest.mark.usefixtures("quick")
def test_hung_copy_does_not_block_the_run(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_failures: list
) -> None:
    monkeypatch.setattr("refrain.engines.learn.mirror.ANSWER_S", 5.0)
    own, end = tmp_path / "own", threading.Event()
    begun: list[Path] = []

    def hang(checkpoint: Path, _: int) -> None:
        begun.append(checkpoint)
        end.wait(60.0)

    monkeypatch.setattr(mirror, "put", hang)
    copies = CheckpointCopies(mirror, own, 2, Failures(tmp_path, lambda _: None))
    write(own, 1)
    wait_until(lambda: len(record_failures) > MAX_LEFT)
    started_s = time.monotonic()
    copies.close()
    assert time.monotonic() - started_s < 5.0
    assert len(begun) == MAX_LEFT, "expected MAX_LEFT threads that hang"
    assert "resume the run to try once more" in copies.missing()[0]
    record_failures.clear()
    end.set()


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _input_output_error(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")
