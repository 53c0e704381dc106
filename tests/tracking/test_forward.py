"""Further trackers get metrics and settings, and none of them holds a run up."""

import os
import sqlite3
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refrain.engines.failures import Failures
from refrain.engines.tracking import forward
from refrain.engines.tracking.forward import Forwarder, require_trackers
from refrain.engines.tracking.outbox import Outbox, Record
from refrain.schemas.config import TrainConfig
from refrain.tasks.run.preflight import read_inputs
from tests.conftest import REPOSITORY

METRICS = {"critic/score/mean": 0.25, "response_length/mean": 12.0}


def installed(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(kind) is None, reason=f"pip install {kind}")


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    values = {"model": {"path": "m"}, "data": {"train": ["d"]}, "runs_dir": tmp_path, "seed": 17}
    config = TrainConfig.model_validate(values | {"trackers": ["mlflow", "wandb"]})
    config.run_dir.mkdir()
    return config


def deliver(config: TrainConfig, kind: str, steps: list[int]) -> None:
    """Deliver metrics of these steps, and end the run."""
    outbox = config.run_dir / "outbox" / kind
    outbox.mkdir(parents=True, exist_ok=True)
    forwarder = Forwarder(kind, config, "refrain", outbox)
    for step in steps:
        forwarder(Record("metrics", {"metrics": METRICS, "step": step, "at_ms": 1000 * step}))
    forwarder(Record("status", {"status": "FINISHED"}))


@installed("tensorboard")
def test_tensorboard_reads_its_event_files(config: TrainConfig) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    deliver(config, "tensorboard", [1, 2])
    deliver(config, "tensorboard", [2, 3])
    found = EventAccumulator(str(config.run_dir / "tensorboard"))
    found.Reload()
    scalars = found.Scalars("critic/score/mean")
    assert {(one.step, one.value, one.wall_time) for one in scalars} == {
        (step, 0.25, float(step)) for step in (1, 2, 3)
    }
    (settings,) = {one.tensor_proto.string_val[0] for one in found.Tensors("settings")}
    assert b'"seed": 17' in settings


def deliver_elsewhere(config: TrainConfig, kind: str, **environment: str) -> None:
    """Deliver steps 1 to 3 in a process of its own, and step 2 again, as after a resume. These
    packages read their environment when they are imported, and write until their process ends."""
    script = (
        "from tests.tracking.test_forward import deliver\n"
        "from refrain.schemas.config import TrainConfig\n"
        f"config = TrainConfig.model_validate_json({config.model_dump_json()!r})\n"
        f"deliver(config, {kind!r}, [1, 2])\n"
        f"deliver(config, {kind!r}, [2, 3])\n"
    )
    own = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]), "PATH": "/usr/bin:/bin"}
    own |= {"HOME": str(config.runs_dir), **environment}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60.0, env=own)


@installed("wandb")
def test_wandb_writes_offline_and_resumes(config: TrainConfig) -> None:
    deliver_elsewhere(config, "wandb")
    runs = sorted((config.run_dir / "wandb").glob("wandb/offline-run-*/*.wandb"))
    assert len(runs) == 2
    assert len({run.name for run in runs}) == 1, "a resumed run keeps its id"
    for run in runs:
        content = run.read_bytes()
        for part in (b"critic/score/mean", b"0.25", b"seed", b"17"):
            assert part in content


@installed("trackio")
def test_trackio_writes_its_database(config: TrainConfig, tmp_path: Path) -> None:
    deliver_elsewhere(config, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    assert len({name for name, *_ in rows}) == 1, "a resumed run keeps its name"
    assert sorted(step for _, step, _ in rows) == [1, 2, 2, 3]
    assert all("critic/score/mean" in str(metrics) for *_, metrics in rows)


class Broken:
    """A tracker that refuses everything."""

    def log(self, *_: Any) -> None:
        raise RuntimeError("no login")

    def close(self, *, failed: bool) -> None: ...


class Stuck(Broken):
    """A tracker whose server never answers."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def log(self, *_: Any) -> None:
        self.released.wait(30.0)


def outbox_to(writer: Any, config: TrainConfig, said: list[str], monkeypatch: Any) -> Outbox:
    module = SimpleNamespace(open_writer=lambda _: writer)
    monkeypatch.setattr(forward, "import_module", lambda _: module)
    directory = config.run_dir / "outbox" / "wandb"
    forwarder = Forwarder("wandb", config, "refrain", directory)
    failures = Failures(config.run_dir, said.append)
    return Outbox(directory, forwarder, "wandb", failures, lambda: True)


def test_a_tracker_that_fails_is_one_warning(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, record_failures: list
) -> None:
    said: list[str] = []
    outbox = outbox_to(Broken(), config, said, monkeypatch)
    for step in range(3):
        outbox.add("metrics", {"metrics": METRICS, "step": step, "at_ms": 0})
    assert outbox.flush(30.0)
    (warning,) = said
    assert "delivering metrics to wandb failed, the run goes on: RuntimeError: no login" in warning
    outbox.close(5.0)
    assert len(record_failures) == 3
    record_failures.clear()


def test_a_stuck_tracker_holds_nobody_up(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = outbox_to(stuck := Stuck(), config, [], monkeypatch)
    started_s = time.monotonic()
    for step in range(3):
        outbox.add("metrics", {"metrics": METRICS, "step": step, "at_ms": 0})
    outbox.close(0.1)
    assert time.monotonic() - started_s < 10.0
    assert "3 records for wandb wait" in outbox.missing()[0]
    stuck.released.set()


def test_a_tracker_that_is_not_installed_is_refused_before_the_start(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="run `pip install wandb`, or remove wandb from trackers"):
        read_inputs(config)
    require_trackers(("mlflow",))


def test_one_tracker_needs_no_list(config: TrainConfig) -> None:
    values = config.model_dump() | {"trackers": "tensorboard"}
    assert TrainConfig.model_validate(values).trackers == ("tensorboard",)
    with pytest.raises(ValueError, match="mlflow"):
        TrainConfig.model_validate(values | {"trackers": ["neptune"]})
