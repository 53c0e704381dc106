"""Only its user can read shared memory, and nothing stays when its process ends or is killed."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from refrain.engines import shared_memory
from refrain.engines.shared_memory import PrivateDir, clear_dead, memory_file

_HOLDS_ALL = """
import sys, time
from pathlib import Path
from refrain.engines import shared_memory
shared_memory.shared_memory = lambda: Path(sys.argv[1])
directory = shared_memory.PrivateDir()
(directory.path / "keys").write_text("k")
with shared_memory.memory_file("weights", b"w" * 1000) as path:
    print(path, flush=True)
    time.sleep(60.0)
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "shared_memory", lambda: tmp_path)
    return tmp_path


@contextmanager
def holder(shared: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start a process that holds a directory and a file in memory. Yield it and the file's path."""
    command = [sys.executable, "-c", _HOLDS_ALL, str(shared)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_killed_process_leaves_no_weights(shared):
    with holder(shared) as (process, weights):
        assert weights.read_bytes() == b"w" * 1000, "this user's processes cannot read the weights"
        assert [path.name for path in shared.rglob("*") if path.is_file()] == ["keys"]
        clear_dead()
        assert len(list(shared.iterdir())) == 1, "removed the directory of a live process"
        process.send_signal(signal.SIGKILL)
        process.wait(30.0)
        assert not weights.exists()
        clear_dead()
        assert not list(shared.iterdir())


def test_directory_is_private_with_unpredictable_name(shared):
    one, other = PrivateDir(), PrivateDir()
    assert all(stat.S_IMODE(each.path.stat().st_mode) == 0o700 for each in (one, other))
    assert not {str(os.getpid())} & set(one.path.name.split("-"))
    assert one.path != other.path
    for each in (one, other):
        (each.path / "file").touch()
        each.delete()
    assert not list(shared.iterdir())


def test_files_of_others_are_not_deleted(shared, monkeypatch):
    """Any user may write there, under any name."""
    (shared / "kept").mkdir()
    (shared / "refrain-file").touch()
    (shared / "refrain-link").symlink_to(shared / "kept")
    clear_dead()
    assert len(list(shared.iterdir())) == 3
    (shared / "refrain-other").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 2**20)
    clear_dead()
    assert (shared / "refrain-other").exists()


def test_file_is_deleted_with_its_block(shared):
    with memory_file("weights", memoryview(b"w")) as path:
        assert path.read_bytes() == b"w"
        assert not list(shared.iterdir())
    assert not path.exists()
    assert not list(shared.iterdir())


def test_files_named_after_a_directory_end_with_it(shared):
    """A process may create such a file after the directory is gone."""
    directory = PrivateDir()
    kept = shared / f"sem.mp-{directory.path.name}-1"
    late = shared / "sem.loky-26844-refrain-n69fgb2p-ed8e"
    others = shared / "refrain-bench-n69fgb2p"
    others.mkdir()
    for file in (kept, late):
        file.touch()
    clear_dead()
    assert set(shared.iterdir()) == {directory.path, kept, others}
    directory.delete()
    clear_dead()
    assert set(shared.iterdir()) == {others}
