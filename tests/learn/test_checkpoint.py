from pathlib import Path

import pytest

from engines.learn.checkpoint import (
    CheckpointState,
    complete_checkpoints,
    latest_checkpoint,
    prune_checkpoints,
    read_state,
    write_checkpoint,
)


def write(directory: Path, step: int, content: str = "weights") -> Path:
    def write_files(path: Path) -> None:
        (path / "model").mkdir()
        (path / "model" / "file").write_text(content)

    state = CheckpointState(step=step, policy_version=step, loader_state={"epoch": 1, "at": [2]})
    return write_checkpoint(directory, state, write_files)


def test_state_comes_back(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    assert path == tmp_path / "global_step_3"
    state = read_state(path)
    assert (state.step, state.policy_version) == (3, 3)
    assert state.loader_state == {"epoch": 1, "at": [2]}
    assert state.file_bytes == {"model/file": 7}


def test_the_newest_is_by_number_not_by_name(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "missing") is None
    for step in (9, 10, 2):
        write(tmp_path, step)
    assert latest_checkpoint(tmp_path) == tmp_path / "global_step_10"


def test_a_crash_while_writing_leaves_the_last_checkpoint_the_newest(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def crash(path: Path) -> None:
        (path / "file").write_text("half")
        raise KeyboardInterrupt

    state = CheckpointState(step=2, policy_version=2, loader_state={})
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, state, crash)
    assert latest_checkpoint(tmp_path) == tmp_path / "global_step_1"
    assert write(tmp_path, 2) == latest_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "missing", "no_state", "half_state", "binary_state"])
def test_damaged_checkpoints_are_passed_over_and_named(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    if damage == "cut":
        (path / "model" / "file").write_text("wei")
    elif damage == "missing":
        (path / "model" / "file").unlink()
    elif damage == "no_state":
        (path / "state.json").unlink()
    elif damage == "half_state":
        (path / "state.json").write_text('{"step": 2,')
    else:
        (path / "state.json").write_bytes(b"\xff\xfe\x00")
    assert latest_checkpoint(tmp_path) == tmp_path / "global_step_1"
    with pytest.raises(ValueError, match="global_step_2"):
        read_state(path)


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 1, "old")
    path = write(tmp_path, 1, "newer")
    assert (path / "model" / "file").read_text() == "newer"
    assert read_state(path).file_bytes == {"model/file": 5}


def test_pruning_keeps_the_newest_and_clears_leftovers(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / ".unfinished_global_step_4").mkdir()
    prune_checkpoints(tmp_path, 2)
    assert [path.name for path in complete_checkpoints(tmp_path)] == [
        "global_step_2",
        "global_step_3",
    ]
    assert len(list(tmp_path.iterdir())) == 2
