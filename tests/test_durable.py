"""A crash or a full disk leaves either the old file or the new one."""

import os
from pathlib import Path

import pytest

from refrain.engines.durable import write_durably
from tests.failing_disks import full_disk


def test_on_a_full_disk_the_file_is_as_it_was(tmp_path):
    file = tmp_path / "config.json"
    write_durably(file, "before")
    with (
        full_disk(),
        pytest.raises(OSError, match=r"config.json takes 50 bytes.* 10: 40 are missing"),
    ):
        write_durably(file, "after" * 10)
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_file_is_on_disk_before_it_is_renamed(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, Path.replace

    def note_fsync(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_replace(path: Path, target: Path) -> Path:
        done.append(f"{path} -> {target}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    file, unfinished = tmp_path / "a.json", tmp_path / ".unfinished_a.json"
    write_durably(file, "text")
    assert done == [str(unfinished), f"{unfinished} -> {file}", str(tmp_path)]
