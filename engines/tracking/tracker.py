"""One MLflow run per training run, and one per profile.

    runs/NAME/mlflow.json    the ids of the MLflow run
    runs/NAME/outbox         records that MLflow does not have yet

The tracker writes each record to disk, and a thread delivers it to MLflow. So a run never waits for
a server, and loses no record while the server is away. Metrics and artifacts have the same names in
every run. Further trackers get the metrics and settings (`engines.tracking.forward`).
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refrain.engines.accounting.names import MAX_PARAMETER_CHARACTERS, tracked_text
from refrain.engines.accounting.step_requests import StepRequest
from refrain.engines.failures import Failures
from refrain.engines.reports.profile import Rung, draw_profile, ladder_rungs
from refrain.engines.reports.timeline import move_rows, timeline_rows
from refrain.engines.reports.timeline_page import Gpus, timeline_page
from refrain.engines.reports.trace_events import write_timeline
from refrain.engines.tracking.forward import MLFLOW, Forwarder
from refrain.engines.tracking.mlflow_client import Deliverer, log_metrics, open_client
from refrain.engines.tracking.mlflow_run import RUN_FILE, MlflowRun, experiment_id
from refrain.engines.tracking.outbox import Outbox
from refrain.schemas.config import TrainConfig
from refrain.schemas.keys import stage_name
from refrain.schemas.latency import ProfilePoint
from refrain.schemas.profile import ProfileConfig, ProfileReport
from refrain.schemas.step import StepPlan
from refrain.schemas.timeline import RecordedTimeline, Timeline

PROFILES = "refrain profiles"
"""MLflow experiment that lists the profiles."""
FLUSH_S = 15.0
"""Longest time that a run waits for its trackers when it ends."""
HURRIED_FLUSH_S = 5.0
"""Longest time that a cancelled run waits for them. Prefect kills the run after 30 s."""
_OUTBOX_DIR = "outbox"


class Tracker:
    """Records metrics and artifacts in order, and delivers them on another thread.

    A failure to record never raises, for example when MLflow refuses a record or the disk is full.
    The tracker counts it instead (`engines.failures`).
    """

    def __init__(
        self,
        config: TrainConfig,
        tracking_uri: str | None,
        failures: Failures | None = None,
        *,
        experiment: str | None = None,
        runs_dir: Path | None = None,
        delivers: bool = True,
    ) -> None:
        """Find or create the MLflow run. A resumed run keeps its MLflow run and needs no server to
        find it.

        Args:
            tracking_uri: MLflow's URI. None: SQLite and files in the runs directory.
            experiment: MLflow experiment, by default that of MLFLOW_EXPERIMENT_NAME, or `refrain`.
            runs_dir: Runs directory, by default the config's.
            delivers: Whether this process delivers records. Only the driver of the run does, and it
                delivers the records of the other processes too.
        """
        self._failures = failures or Failures(config.run_dir)
        self._run_dir = config.run_dir
        # Measured once, so that a span has the same times in every timeline that shows it.
        self._clock_zero_s = time.time() - time.monotonic()
        client, artifacts = open_client(runs_dir or config.runs_dir, tracking_uri)
        name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "refrain"
        self._run = MlflowRun(client, config, name, artifacts, self._failures)
        if delivers:
            with self._failures.contained("making the MLflow run"):
                self._run.make()
        deliver = Deliverer(client, self._run)
        self._outbox = Outbox(
            config.run_dir / _OUTBOX_DIR / MLFLOW,
            deliver,
            "MLflow",
            self._failures,
            delivers=delivers,
            is_up=deliver.is_up,
        )
        if delivers:
            self._outbox.add("status", {"status": "RUNNING"})
        kinds = [kind for kind in config.trackers if kind != MLFLOW]
        self._further = [self._forwarding(kind, config, name, delivers) for kind in kinds]

    def _forwarding(self, kind: str, config: TrainConfig, project: str, delivers: bool) -> Outbox:
        directory = config.run_dir / _OUTBOX_DIR / kind
        forwarder = Forwarder(kind, config, project, directory)
        return Outbox(directory, forwarder, kind, self._failures, lambda: True, delivers)

    @property
    def run_id(self) -> str:
        """Id of the MLflow run; empty before MLflow has created it."""
        return self._run.run_id

    @property
    def experiment_id(self) -> str:
        return self._run.experiment_id

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        values = {"metrics": dict(metrics), "step": step, "at_ms": int(time.time() * 1000)}
        for outbox in (self._outbox, *self._further):
            outbox.add("metrics", values)

    def log_system(self, metrics: Mapping[str, float]) -> None:
        """Log system metrics, from any thread. Their step is the run's age in seconds, because they
        belong to no training step."""
        now_s = time.time()
        age_s = round(now_s - (self._run_dir / RUN_FILE).stat().st_mtime)
        values = {"metrics": dict(metrics), "step": max(0, age_s), "at_ms": int(now_s * 1000)}
        self._outbox.add("metrics", values)

    def log_tags(self, tags: Mapping[str, str]) -> None:
        self._outbox.add("tags", tags)

    def log_datasets(self, datasets: Sequence[Mapping[str, Any]]) -> None:
        """Log the data sets of a run: name, digest, context, files and number of rows of each."""
        self._outbox.add("inputs", {"datasets": list(datasets)})

    def log_checkpoint(self, step: int, tags: Mapping[str, str]) -> None:
        """Log a checkpoint as a logged model, see `engines.tracking.logged_models`."""
        self._outbox.add("model", {"step": step, "tags": dict(tags)})

    def log_validated(self, step: int) -> None:
        """Copy the validation metrics of this step, which are logged already, to its model."""
        self._outbox.add("validated", {"step": step})

    def log_plan(self, plan: StepPlan) -> None:
        self.log_file(
            "plans", f"{stage_name(plan.split, plan.step)}.json", plan.model_dump_json().encode()
        )

    def log_file(self, folder: str | None, name: str, content: bytes) -> None:
        """Log a file, in place of an earlier one of the same name."""
        self._outbox.add("file", {"folder": folder, "name": name}, (name, content))

    def log_table(self, folder: str | None, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table, in place of an earlier one of the same name. So a repeated step has one."""
        columns = list(rows[0]) if rows else []
        table = {"columns": columns, "data": [list(row.values()) for row in rows]}
        content, file = json.dumps(table).encode(), f"{name}.json"
        self._outbox.add("table", {"folder": folder, "name": file}, (file, content))

    def log_timeline(self, timeline: Timeline, name: str) -> None:
        """Log a table of the engines' work and a table of the moves. `name`: `split-step`.

        The timeline itself is written to the run's directory. Its times are those of this process's
        event loop.
        """
        with self._failures.contained("timelines"):
            write_timeline(self._run_dir, name, RecordedTimeline(timeline, self._clock_zero_s))
            self.log_table("timelines", name, timeline_rows(timeline))
            if timeline.moves:
                self.log_table("moves", name, move_rows(timeline))

    def log_timeline_page(
        self, recorded: RecordedTimeline, name: str, requests: Sequence[StepRequest], gpus: Gpus
    ) -> None:
        """Log a page of the timeline with its savings. Call it after the reward stage."""
        write_timeline(self._run_dir, name, recorded)
        with self._failures.contained("pages of timelines"):
            page = timeline_page(recorded, requests, gpus, _title(name))
            self.log_file("timelines", f"{name}.html", page.encode())

    def flush(self) -> None:
        """Wait until MLflow has all records, for at most `FLUSH_S`."""
        self._outbox.flush(FLUSH_S)

    def missing(self) -> list[str]:
        """Return sentences for the user about records that trackers do not have."""
        return [said for outbox in (self._outbox, *self._further) for said in outbox.missing()]

    def close(self, status: str) -> None:
        """End the run as FINISHED, FAILED or KILLED. Records that trackers do not accept in time
        are delivered when the run is resumed."""
        outboxes = (self._outbox, *self._further)
        for outbox in outboxes:
            outbox.add("status", {"status": status})
        end_s = time.monotonic() + (HURRIED_FLUSH_S if status == "KILLED" else FLUSH_S)
        for outbox in outboxes:
            outbox.close(max(0.0, end_s - time.monotonic()))


def record_profile(report: ProfileReport, config: ProfileConfig, tracking_uri: str | None) -> None:
    """Log a profile's points, accuracy and pictures. The pictures are drawn beside the profile."""
    profile, pictures = report.profile, draw_profile(report)
    client, artifacts = open_client(config.runs_dir, tracking_uri)
    experiment = experiment_id(client, PROFILES, artifacts)
    run_id = client.create_run(experiment, run_name=report.profile_file.parent.name).info.run_id
    for name, value in (config.model_dump(mode="json") | {"hardware": profile.hardware}).items():
        client.log_param(run_id, name, tracked_text(str(value), MAX_PARAMETER_CHARACTERS))
    for name, accuracies in (
        ("held_out", report.held_out),
        ("between_batches", report.between_batches),
    ):
        for accuracy in accuracies:
            client.log_metric(run_id, f"{name}/{accuracy.kind}", accuracy.median_error)
    columns = {
        field: [getattr(point, field) for point in profile.points]
        for field in ProfilePoint.model_fields
    }
    client.log_table(run_id, columns, "points.json")
    if rungs := ladder_rungs(profile):
        columns = {field: [getattr(rung, field) for rung in rungs] for field in Rung._fields}
        client.log_table(run_id, columns, "ladder.json")
    for file in (report.profile_file, *pictures):
        client.log_artifact(run_id, str(file))
    client.set_terminated(run_id, "FINISHED")


def mark_killed(run_dir: Path, tracking_uri: str | None, mlflow_dir: Path) -> None:
    """Set the MLflow run of a killed process to KILLED. `mlflow_dir`: directory of MLflow's files,
    used without a URI."""
    file = run_dir / RUN_FILE
    if not file.exists():
        return
    with Failures(run_dir).contained("ending the MLflow run"):
        client, _ = open_client(mlflow_dir, tracking_uri)
        run_id = json.loads(file.read_text())["run_id"]
        if client.get_run(run_id).info.status == "RUNNING":
            client.set_terminated(run_id, "KILLED")


def add_to_run(
    run_dir: Path, tracking_uri: str | None, metrics: Mapping[str, float], step: int
) -> None:
    """Add metrics to the MLflow run of a training run, which may have ended.

    Raise ValueError when the training run has no MLflow run.
    """
    file = run_dir / RUN_FILE
    if not file.exists():
        raise ValueError(f"{run_dir} has no run in MLflow: the file {RUN_FILE} is missing")
    client, _ = open_client(run_dir.parent, tracking_uri)
    run_id = json.loads(file.read_text())["run_id"]
    log_metrics(client, run_id, metrics, step, int(time.time() * 1000))


def is_known(config: TrainConfig) -> bool:
    """Return whether MLflow has this run already."""
    return (config.run_dir / RUN_FILE).exists()


def _title(name: str) -> str:
    split, _, step = name.partition("-")
    return f"{split} step {int(step)}"
