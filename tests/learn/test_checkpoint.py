"""Checkpoints: written atomically, verified when read, and never read from outside their folder."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from refrain.engines.durable import is_disk_full
from refrain.engines.learn.checkpoint import (
    CheckpointState,
    complete_checkpoints,
    latest_checkpoint,
    newest_verified,
    parse_state,
    prune_checkpoints,
    read_state,
    verify,
    verify_model,
    write_checkpoint,
)
from tests.failing_disks import Disk, full_disk


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


def test_visible_checkpoint_is_complete_on_disk(tmp_path, monkeypatch) -> None:
    disk = Disk(monkeypatch)
    for content in ("weights", "others"):
        write(tmp_path, 3, content)
        assert not disk.named_too_early
        assert not disk.unsettled


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


def flip(file: Path, at: int) -> None:
    """Flip bit number `at` of a file."""
    content = bytearray(file.read_bytes())
    content[at // 8] ^= 1 << at % 8
    file.write_bytes(content)


def test_a_bit_of_the_state_that_was_flipped_is_found(tmp_path: Path) -> None:
    """Flip each bit in turn. Reading must fail unless only white space changed."""
    whole = (write(tmp_path, 2) / "state.json").read_bytes()
    state, ignored = json.loads(whole), 0
    for at in range(8 * len(whole)):
        content = bytearray(whole)
        content[at // 8] ^= 1 << at % 8
        try:
            same = json.loads(content) == state
        except ValueError:
            same = False
        if same:
            ignored += 1
            continue
        with pytest.raises(ValueError, match=r"^it is damaged"):
            parse_state(bytes(content), "it")
    assert ignored < len(whole) / 10


def test_a_bit_of_a_file_that_was_flipped_is_found(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    flip(path / "model" / "file", 3)
    assert latest_checkpoint(tmp_path) == path
    with pytest.raises(ValueError, match=r"model/file is damaged: its SHA-256 .* earlier"):
        verify(path)
    with pytest.raises(ValueError, match="model/file is damaged"):
        verify_model(path / "model")
    found, damaged = newest_verified(tmp_path)
    assert (found, list(damaged)) == (tmp_path / "global_step_1", [path])


def test_ranks_share_out_what_is_verified(tmp_path: Path) -> None:
    def write_files(path: Path) -> None:
        for name in "abc":
            (path / name).write_text(name)

    state = CheckpointState(step=1, policy_version=1, loader_state={})
    path = write_checkpoint(tmp_path, state, write_files)
    for name in "abc":
        flip(path / name, 0)
        caught = 0
        for rank in range(2):
            try:
                verify(path, rank=rank, world_size=2)
            except ValueError:
                caught += 1
        assert caught == 1
        flip(path / name, 0)


OUTSIDE = ["../../../x", "/tmp/x", "model/../../x", "..", ".", "", "model//file", "state.json"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_file_that_leads_out_of_the_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "own", 1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"file_bytes": {name: 4}}))
    with pytest.raises(
        ValueError, match=r"state\.json is damaged .*is not the path of a file in this"
    ):
        read_state(path)


def test_a_link_out_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "own", 1)
    (path / "model" / "file").rename(tmp_path / "elsewhere")
    (path / "model" / "file").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="model/file leads out of the checkpoint"):
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


def save_tensors(path: Path) -> None:
    import torch

    with (path / "tensors.pt").open("wb") as file:
        torch.save(torch.zeros(300_000), file)


def save_weights(path: Path) -> None:
    import safetensors.torch
    import torch

    safetensors.torch.save_file({"w": torch.zeros(300_000)}, path / "model.safetensors")


def copy_file(path: Path) -> None:
    (path / "tokenizer.json").write_text("t" * 1_200_000)


STATE = CheckpointState(step=2, policy_version=2, loader_state={})


@pytest.mark.parametrize("write_files", [save_tensors, save_weights, copy_file])
def test_a_disk_that_becomes_full_is_named_with_the_bytes_missing(
    tmp_path: Path, write_files: Callable[[Path], None]
) -> None:
    write(tmp_path, 1)
    with (
        full_disk(500_000),
        pytest.raises(OSError, match="No space left on device: checkpoint global_step_2") as full,
    ):
        write_checkpoint(tmp_path, STATE, write_files, num_bytes=1_200_000)
    said = re.search(
        r"the disk of (\S+), mounted at /.* room for (\S+): (\S+) are", str(full.value)
    )
    assert said
    room, missing = (int(text.replace(",", "")) for text in said.groups()[1:])
    assert said[1] == str(tmp_path)
    assert room <= 500_000
    assert room + missing == 1_200_000
    assert is_disk_full(RuntimeError(str(full.value))), "Ray passes on only the message"
    assert is_disk_full(RuntimeError("Could not write file refrain.duckdb.wal: File too large"))
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]


def test_a_checkpoint_that_does_not_fit_is_not_begun(tmp_path: Path) -> None:
    begun: list[Path] = []
    with pytest.raises(OSError, match=r"takes 1,000,000,000,000,000,000 bytes.*are missing"):
        write_checkpoint(tmp_path, STATE, begun.append, num_bytes=10**18)
    assert begun == []


def test_other_errors_of_a_checkpoint_stay_what_they_are(tmp_path: Path) -> None:
    def refuse(_: Path) -> None:
        raise ValueError("no such tensor")

    with pytest.raises(ValueError, match="no such tensor"):
        write_checkpoint(tmp_path, STATE, refuse, num_bytes=10)
    assert list(tmp_path.iterdir()) == []
