"""Weight files of policy versions: their format, how long they are kept, and refused files."""

import json
import os
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from refrain.engines import shared_memory, weights_file
from refrain.engines.shared_memory import clear_dead
from refrain.engines.weights_file import NoRoom, VersionFiles, WrongFile, check_file, lay_out

SHAPES = {"head": (3, 5), "norm": (7,), "scale": (), "none": (0, 4)}


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (shared_memory, weights_file):
        monkeypatch.setattr(module, "shared_memory", lambda: tmp_path)
    return tmp_path


def write(files: VersionFiles, version: int, fill: bytes = b"\0") -> Path:
    layout = lay_out(SHAPES, "F32", {"policy_version": str(version)})
    with files.writing(version, layout.num_bytes) as memory:
        memory[:] = fill * layout.num_bytes
        memory[: len(layout.header)] = layout.header
    return files.path(version)


def fail(files: VersionFiles, version: int, num_bytes: int) -> None:
    """Fail while a version is written. For version 2 a reader refuses the unfinished file."""
    with files.writing(version, num_bytes):
        (unfinished,) = files.path(version).parent.glob(".unfinished-*")
        if version == 2:
            check_file(unfinished, version)
        raise ZeroDivisionError


def names(shared: Path) -> list[str]:
    return sorted(path.name for path in shared.rglob("*") if path.is_file())


def test_the_layout_is_that_of_safetensors(tmp_path):
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    layout = lay_out(SHAPES, "F32", {"format": "pt"})
    content = bytearray(layout.num_bytes)
    content[: len(layout.header)] = layout.header
    for name, tensor in tensors.items():
        own = tensor.numpy().tobytes()
        content[layout.offsets[name] : layout.offsets[name] + len(own)] = own
    (tmp_path / "file").write_bytes(content)
    torch.testing.assert_close(load_file(tmp_path / "file"), tensors, rtol=0.0, atol=0.0)
    check_file(tmp_path / "file", 7)  # The file does not say its version, so any version is right.


def test_the_last_versions_are_kept_and_old_memory_is_used_again(shared):
    files = VersionFiles(num_kept=2)
    first = write(files, 0, b"a")
    inode = first.stat().st_ino
    write(files, 1, b"b")
    assert names(shared) == ["0.safetensors", "1.safetensors"]
    third = write(files, 2, b"c")
    assert names(shared) == ["1.safetensors", "2.safetensors"]
    assert third.stat().st_ino == inode
    assert third.read_bytes().endswith(b"cccc")
    assert files.path(1).read_bytes().endswith(b"bbbb")
    # A resumed trainer writes the same version again. It must not write over a file in use.
    write(files, 2, b"d")
    assert files.path(2).stat().st_ino != inode
    write(files, 9)
    assert names(shared) == ["9.safetensors"]
    files.delete()
    assert not list(shared.iterdir())


def test_memory_that_somebody_else_took_away_is_not_written_to(shared):
    """A write beyond the end of a mapped file would kill the process."""
    files = VersionFiles(num_kept=1)
    os.truncate(write(files, 0), 10)
    assert write(files, 1).read_bytes().endswith(b"\0" * 8)
    files.path(1).unlink()
    check_file(write(files, 2), 2)
    assert names(shared) == ["2.safetensors"]
    files.delete()


def test_a_write_that_fails_leaves_the_other_versions(shared):
    files = VersionFiles(num_kept=1)
    write(files, 0)
    write(files, 1)
    with pytest.raises(ZeroDivisionError):
        fail(files, 1, 4096)
    assert names(shared) == ["1.safetensors"]
    with pytest.raises(WrongFile, match="no valid safetensors header"):
        fail(files, 2, files.path(1).stat().st_size)
    assert names(shared) == []
    files.delete()


@pytest.mark.usefixtures("shared")
def test_reader_of_overwritten_weights_gets_an_error():
    files = VersionFiles(num_kept=1)
    old = write(files, 0)
    check_file(old, 0)
    write(files, 1)
    with pytest.raises(WrongFile, match="is gone: policy version 0 is no longer kept"):
        check_file(old, 0)
    files.delete()


def test_a_file_of_another_version_or_cut_short_is_refused(shared):
    files = VersionFiles(num_kept=1)
    path = write(files, 3)
    check_file(path, 3)
    with pytest.raises(WrongFile, match="is of policy version 3, not 4"):
        check_file(path, 4)
    whole = path.read_bytes()
    for kept in (len(whole) - 1, len(whole) // 2, 100, 9, 8, 4, 0):
        path.write_bytes(whole[:kept])
        with pytest.raises(WrongFile, match=rf"{kept} bytes"):
            check_file(path, 3)
    path.write_bytes(whole + b"\0")
    with pytest.raises(WrongFile, match=rf"has {len(whole) + 1} bytes, but its header says"):
        check_file(path, 3)
    for text in (b"[]", b'{"a": 1}', b'{"a": {"data_offsets": []}}'):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(WrongFile):
            check_file(path, 3)
    check_file_of_torch = shared / "torch"
    check_file_of_torch.write_bytes(save({"a": torch.ones(3)}, {"policy_version": "5"}))
    check_file(check_file_of_torch, 5)
    files.delete()


def test_small_shared_memory_is_reported_before_writing(shared, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(weights_file.shutil, "disk_usage", lambda _: usage(20e9, 0, 17e9))
    files = VersionFiles(num_kept=2)
    with (
        pytest.raises(
            NoRoom,
            match="take 10 GB, .* must hold 2 more versions: 20 GB. But only 17 GB of "
            r"the 20 GB of .* are free.*docker run --shm-size.*emptyDir of medium Memory",
        ),
        files.writing(0, 10**10),
    ):
        raise AssertionError("began to write without enough room")
    assert names(shared) == []
    write(files, 0)
    write(files, 1)
    # Memory that the files already have is not needed again.
    monkeypatch.setattr(weights_file.shutil, "disk_usage", lambda _: usage(20e9, 20e9, 0))
    write(files, 2)
    files.delete()


_WRITES = """
import sys, time
from pathlib import Path
from refrain.engines import shared_memory, weights_file
for module in (shared_memory, weights_file):
    module.shared_memory = lambda: Path(sys.argv[1])
files = weights_file.VersionFiles(2)
with files.writing(0, 4096):
    pass
with files.writing(1, 4096):
    print(files.path(0), flush=True)
    time.sleep(60.0)
"""


def test_nothing_is_left_of_a_process_that_is_killed_while_it_writes(shared):
    command = [sys.executable, "-c", _WRITES, str(shared)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        path = Path(process.stdout.readline().strip())
        clear_dead()
        assert names(shared) == [".unfinished-1", "0.safetensors"]
        assert path.stat().st_size == 4096
        process.kill()
        process.wait(30.0)
        clear_dead()
        assert not list(shared.iterdir())


def test_the_header_can_be_read_by_anybody():
    layout = lay_out(SHAPES, "BF16", {"policy_version": "1"})
    length = int.from_bytes(layout.header[:8], "little")
    assert len(layout.header) == 8 + length
    assert len(layout.header) % 64 == 0
    entries = json.loads(layout.header[8:])
    assert entries["head"] == {"dtype": "BF16", "shape": [3, 5], "data_offsets": [0, 30]}
    assert entries["scale"]["data_offsets"] == [44, 46]
    assert re.fullmatch(r"\{.*\} *", layout.header[8:].decode())
