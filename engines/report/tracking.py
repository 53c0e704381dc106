"""One MLflow run per training run."""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engines.report.trace_events import write_timeline
from schemas.config import TrainConfig
from schemas.step import StepPlan
from schemas.timeline import RecordedTimeline, Timeline

RUN_FILE = "mlflow.json"


def mark_killed(
    config: TrainConfig, tracking_uri: str | None, runs_dir: Path | None = None
) -> None:
    """End the run on MLflow's page, where its process was killed before it could."""
    file = config.run_dir / RUN_FILE
    if not file.exists():
        return
    client, _ = open_client(runs_dir or config.runs_dir, tracking_uri)
    run_id = json.loads(file.read_text())["run_id"]
    if client.get_run(run_id).info.status == "RUNNING":
        client.set_terminated(run_id, "KILLED")


def add_to_run(
    run_dir: Path, tracking_uri: str | None, metrics: Mapping[str, float], step: int
) -> None:
    """Add metrics to the MLflow run of a run that need not be alive.

    Raises ValueError when it has none.
    """
    file = run_dir / RUN_FILE
    if not file.exists():
        raise ValueError(f"{run_dir} has no run in MLflow: it holds no {RUN_FILE}")
    client, _ = open_client(run_dir.parent, tracking_uri)
    _log_metrics(client, json.loads(file.read_text())["run_id"], metrics, step)


class Tracker:
    """Writes metrics and artifacts off the caller's thread, in order.

    An error in writing is raised by the next call, or by `close`.
    """

    def __init__(
        self,
        config: TrainConfig,
        tracking_uri: str | None,
        *,
        experiment: str = "refrain",
        runs_dir: Path | None = None,
    ) -> None:
        """Without a URI: SQLite and files in the runs directory, by default the config's. A resumed
        run goes on as the same MLflow run."""
        self._client, artifacts = open_client(runs_dir or config.runs_dir, tracking_uri)
        self.run_id = self._open(config, experiment, artifacts)
        self._run_dir = config.run_dir
        # Once: spans that two timelines share must have the same times in both.
        self._clock_zero_s = time.time() - time.monotonic()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._pending: list[Future] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._write(self._log_metrics, dict(metrics), step)

    def log_plan(self, plan: StepPlan) -> None:
        path = f"plans/{plan.split}-{plan.step:05d}.json"
        self._write(self._client.log_dict, self.run_id, plan.model_dump(mode="json"), path)

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """A table of rollouts: one file per step, as appending rewrites a file."""
        self._write(self._client.log_table, self.run_id, _columns(rows), f"rollouts/{name}.json")

    def log_timeline(self, timeline: Timeline, name: str) -> None:
        """A picture of what the engines did, and the same as a table; the name is `split-step`.
        The timeline itself, on the clock of this process's event loop, stays with the run."""
        recorded = RecordedTimeline(timeline, self._clock_zero_s)
        self._write(write_timeline, self._run_dir, name, recorded)
        self._write(self._log_timeline, timeline, name)

    def close(self, status: str) -> None:
        """Wait for what is pending, then end the run as FINISHED, FAILED or KILLED."""
        self._writer.shutdown(wait=True)
        self._client.set_terminated(self.run_id, status)
        self._raise_finished()

    def _open(self, config: TrainConfig, experiment: str, artifacts: Path | None) -> str:
        file = config.run_dir / RUN_FILE
        if file.exists():
            run_id = json.loads(file.read_text())["run_id"]
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        run = self._client.create_run(
            experiment_id(self._client, experiment, artifacts), run_name=config.name
        )
        run_id = run.info.run_id
        self._client.log_dict(run_id, config.model_dump(mode="json"), "config.json")
        for name, value in _flat_params(config).items():
            self._client.log_param(run_id, name, value)
        file.write_text(json.dumps({"run_id": run_id}))
        return run_id

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        _log_metrics(self._client, self.run_id, metrics, step)

    def _log_timeline(self, timeline: Timeline, name: str) -> None:
        from engines.report.timeline import draw_timeline, timeline_rows

        with TemporaryDirectory() as directory:
            picture = Path(directory, f"{name}.png")
            split, _, step = name.partition("-")
            draw_timeline(timeline, picture, f"{split} step {int(step)}")
            self._client.log_artifact(self.run_id, str(picture), "timelines")
        self._client.log_table(
            self.run_id, _columns(timeline_rows(timeline)), f"timelines/{name}.json"
        )

    def _write(self, function: Any, *args: Any) -> None:
        self._raise_finished()
        self._pending.append(self._writer.submit(function, *args))

    def _raise_finished(self) -> None:
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if not future.done()]
        for future in done:
            future.result()


def _log_metrics(client: Any, run_id: str, metrics: Mapping[str, float], step: int) -> None:
    from mlflow.entities import Metric

    now_ms = int(time.time() * 1000)
    values = [Metric(name, value, now_ms, step) for name, value in metrics.items()]
    client.log_batch(run_id, values)


def open_client(runs_dir: Path, tracking_uri: str | None) -> tuple[Any, Path | None]:
    """An MLflow client, and where its artifacts go: without a URI, beside the runs."""
    from mlflow import MlflowClient

    if tracking_uri:
        return MlflowClient(tracking_uri), None
    runs_dir = runs_dir.absolute()
    return MlflowClient(f"sqlite:///{runs_dir}/mlflow.db"), runs_dir / "mlflow-artifacts"


def experiment_id(client: Any, name: str, artifacts: Path | None) -> str:
    """Of the experiment with this name, which is made when it is missing."""
    experiment = client.get_experiment_by_name(name)
    if experiment:
        return experiment.experiment_id
    location = artifacts.as_uri() if artifacts else None
    return client.create_experiment(name, artifact_location=location)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in (rows[0] if rows else {})}


def _flat_params(config: TrainConfig) -> dict[str, Any]:
    """Two levels are all a config has: `trainer.learning_rate`."""
    params: dict[str, Any] = {}
    for section, value in config.model_dump(mode="json").items():
        if isinstance(value, dict):
            params |= {f"{section}.{name}": inner for name, inner in value.items()}
        else:
            params[section] = value
    return params
