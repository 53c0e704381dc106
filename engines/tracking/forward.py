"""Forward a run's metrics and settings to trackers besides MLflow.

    Tracker.log_metrics ─► outbox/wandb (files) ─► its thread: Forwarder ─► wandb

Each tracker has its own outbox (`engines.tracking.outbox`): a slow one delays nobody, and one that
fails is a warning.
"""

import uuid
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from refrain.engines.durable import write_durably
from refrain.engines.tracking.mlflow_run import flat_params
from refrain.engines.tracking.outbox import Record
from refrain.schemas.config import TrainConfig

MLFLOW = "mlflow"
_ID_FILE = "run_id"


class TrackedRun(NamedTuple):
    """The run that a tracker shows."""

    name: str
    project: str
    id: str
    """The same after a resume."""
    directory: Path
    """Directory for the tracker's files."""
    settings: Mapping[str, Any]
    """Settings by dotted name."""


class MetricWriter(Protocol):
    """An open run of a tracker. `engines.tracking.to_NAME` has one for each tracker."""

    def log(self, metrics: Mapping[str, float], step: int, at_s: float) -> None:
        """Log metrics of a step. `at_s`: Unix time. Steps may come in any order and again."""

    def close(self, *, failed: bool) -> None: ...


class Forwarder:
    """Delivers the records of an outbox to one tracker, and opens it with the first record."""

    def __init__(self, kind: str, config: TrainConfig, project: str, outbox: Path) -> None:
        self._kind, self._config, self._project, self._outbox = kind, config, project, outbox
        self._writer: MetricWriter | None = None

    def __call__(self, record: Record) -> None:
        """Deliver a record. The tracker's errors propagate."""
        self._writer = self._writer or self._open()
        match record.kind:
            case "metrics":
                values = record.values
                self._writer.log(values["metrics"], values["step"], values["at_ms"] / 1e3)
            case "status":
                self._writer.close(failed=record.values["status"] != "FINISHED")
                self._writer = None
            case _:
                raise AssertionError(f"unknown kind of record: {record.kind}")

    def _open(self) -> MetricWriter:
        module = import_module(f"refrain.engines.tracking.to_{self._kind}")
        open_writer: Callable[[TrackedRun], MetricWriter] = module.open_writer
        directory = self._config.run_dir.absolute() / self._kind
        directory.mkdir(exist_ok=True)
        settings = flat_params(self._config)
        name = self._config.name
        return open_writer(TrackedRun(name, self._project, self._run_id(), directory, settings))

    def _run_id(self) -> str:
        file = self._outbox / _ID_FILE
        if not file.exists():
            write_durably(file, uuid.uuid4().hex[:16])
        return file.read_text()


def require_trackers(kinds: tuple[str, ...]) -> None:
    """Raise ValueError when a tracker's package is not installed."""
    for kind in kinds:
        if kind != MLFLOW and find_spec(kind) is None:
            raise ValueError(
                f"trackers names {kind}, but its package is not installed: run `pip install "
                f"{kind}`, or remove {kind} from trackers"
            )
