"""A directory with small, good input of every kind, and hostile files beside it."""

import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from refrain.engines.reports.trace_events import write_timeline
from refrain.engines.simulate.trace import Trace, write_trace
from refrain.engines.store.store import Store
from refrain.schemas.resume import OnResume, SettingChange
from refrain.tasks.run.run_dir import CHANGES_FILE, STORE_FILE
from tests.conftest import DEMO, REPOSITORY
from tests.data.test_malformed_rows import good_row
from tests.flows.commands import write_config
from tests.flows.run_dirs import make_checkpoint, make_run, progress, summary
from tests.reports.test_trace_events import FIRST
from tests.store.test_archive import add_step

NUM_STEPS = 14
"""More than an epoch of `add_step`: `refrain report` compares two epochs."""
LONG = "n" * 300
HUGE_BYTES = 2**36
"""Size of a sparse file, larger than the memory."""
SCORER = "def compute_score(data_source, solution_str, ground_truth):\n    return 0\n"
LOSSES = "def policy_loss(batch):\n    return 0\n"

Tree = dict[str, tuple[Any, ...]]


class HostilePlace:
    """Good files in `directory`, a copy of them in `good`, and hostile files in `hostile`."""

    def __init__(self, root: Path) -> None:
        self.good, self.directory, self.hostile = root / "good", root / "here", root / "hostile"
        self._made: dict[Path, str] = {}
        self.hostile.mkdir(parents=True)
        # A run's files have absolute paths, so create them where they are used.
        self.directory.mkdir()
        _fill(self.directory)
        shutil.copytree(self.directory, self.good, symlinks=True)
        self._before = self._tree()

    def path(self, kind: str, suffix: str = "") -> str:
        """Return a hostile path of this kind, and create its file if it has one."""
        if kind in NAMES:
            return str(self.hostile / NAMES[kind]) + ("" if kind in WHOLE else suffix)
        path = self.hostile / f"{kind.replace(' ', '_')}{suffix}"
        if kind in MAKERS and path not in self._made:
            self._made[path] = kind
            MAKERS[kind](path)
            self._before = self._tree()
        return str(path)

    def changed(self) -> list[str]:
        """Return the paths that have changed, and restore all files."""
        now, before = self._tree(), self._before
        wrong = sorted(p for p in now.keys() | before.keys() if now.get(p) != before.get(p))
        if wrong:
            _empty(self.directory)
            shutil.copytree(self.good, self.directory, symlinks=True, dirs_exist_ok=True)
            _empty(self.hostile)
            for path, kind in self._made.items():
                MAKERS[kind](path)
            self._before = self._tree()
        return wrong

    @contextmanager
    def instead(self, file: str, kind: str) -> Iterator[None]:
        """Replace a good file or directory by a hostile one for a while."""
        given, good = self.directory / file, self.good / file
        _remove(given)
        if kind in MAKERS:
            MAKERS[kind](given)
        self._before = self._tree()
        yield
        _remove(given)
        copy = shutil.copytree if good.is_dir() else shutil.copy2
        copy(good, given, **({"symlinks": True} if good.is_dir() else {}))
        self._before = self._tree()

    def changes_are_meant(self) -> None:
        """Accept the current files as unchanged."""
        self._before = self._tree()

    def _tree(self) -> Tree:
        """Return the modes of all entries, and sizes and modification times of files."""
        return dict(_entries(self.directory)) | dict(_entries(self.hostile))


def _empty(directory: Path) -> None:
    """Remove all entries. The directory stays, because the driver runs in it."""
    for path in directory.iterdir():
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


NAMES = {
    "no directory": "nowhere/file",
    "name of 300 characters": LONG,
    "a line break": "one\ntwo",
    "not UTF-8": "torn\udcff",
    "path of 5,000 characters": "/".join(["deep" * 10] * 125),
}
WHOLE = ("name of 300 characters", "path of 5,000 characters")


def _device(minor: int) -> Callable[[Path], None]:
    """Return a function that makes a device of the test's own, which a command may delete."""

    def make(path: Path) -> None:
        if os.geteuid():
            path.symlink_to("/dev/zero")
        else:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))

    return make


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        # The path may be too long for the address of a socket.
        here = os.open(path.parent, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE_BYTES)


MAKERS: dict[str, Callable[[Path], object]] = {
    "empty device": _device(3),
    "endless device": _device(5),
    "full device": _device(7),
    "empty": lambda path: path.touch(),
    "directory": lambda path: path.mkdir(),
    "dangling link": lambda path: path.symlink_to("nobody/is/there"),
    "link loop": lambda path: path.symlink_to(path.name),
    "FIFO": lambda path: os.mkfifo(path),
    "socket": _socket,
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "a word": lambda path: path.write_text("word\n"),
    "depth": lambda path: path.write_text('{"a": ' + "[" * 30_000 + "]" * 30_000 + "}"),
    "huge": _huge,
    "no permission": lambda path: (path.write_text("{}"), path.chmod(0)),
}


def _entries(directory: Path) -> Iterator[tuple[str, tuple[Any, ...]]]:
    pending = [str(directory)]
    while pending:
        for entry in os.scandir(pending.pop()):
            status = entry.stat(follow_symlinks=False)
            is_directory = entry.is_dir(follow_symlinks=False)
            written = () if is_directory else (status.st_size, status.st_mtime_ns)
            yield entry.path, (status.st_mode, *written)
            if is_directory and entry.name != "__pycache__":
                pending.append(entry.path)


def _fill(directory: Path) -> None:
    shutil.copytree(DEMO / "model", directory / "model")
    shutil.copytree(DEMO / "drafter", directory / "drafter")
    for name in ("infra", "prefect.yaml"):
        (directory / name).symlink_to(REPOSITORY / name)
    write_config(directory, model__path=str(directory / "model"), profile=None)
    (directory / "scorer.py").write_text(SCORER)
    (directory / "losses.py").write_text(LOSSES)
    (directory / "rows.jsonl").write_text(
        "".join(json.dumps(good_row(number)) + "\n" for number in range(8))
    )
    shutil.copy(REPOSITORY / "benchmarks/baselines/profile_demo.json", directory / "profile.json")
    rows = [
        {
            "step": step,
            "epoch": 0,
            "prompt_key": key,
            "sample_index": 0,
            "prompt_tokens": 4,
            "response_tokens": 8,
        }
        for step in (1, 2)
        for key in ("a", "b")
    ]
    write_trace(Trace(pa.Table.from_pylist(rows), "made"), directory / "trace.parquet")
    _make_run(directory)


def _make_run(directory: Path) -> None:
    runs_dir = directory / "runs"
    run = make_run(runs_dir, "demo", (0.25, 0.5), progress(), summary(NUM_STEPS))
    values = json.loads((run / "config.json").read_text())
    values["model"]["path"] = str(directory / "model")
    values["data"]["train"] = [str(directory / "train.parquet")]
    values["data"]["validation"] = [str(directory / "validation.parquet")]
    values["data"] |= {"max_prompt_tokens": 128, "max_response_tokens": 256}
    values["prompts_per_step"] = 12
    (run / "config.json").write_text(json.dumps(values))
    (run / "mlflow_run.json").write_text('{"run_id": "0"}')
    change = SettingChange(name="seed", before=0, after=1, on_resume=OnResume.FREE)
    (run / CHANGES_FILE).write_text(change.model_dump_json() + "\n")
    (run / ".lock").touch()
    write_timeline(run, "train-00001", FIRST)
    checkpoint = make_checkpoint(run, 2)
    shutil.copytree(DEMO / "drafter", checkpoint / "model", dirs_exist_ok=True)
    with Store(run / STORE_FILE) as store:
        for step in range(1, NUM_STEPS):
            add_step(store, step)
