"""Connect to MLflow, a server or files beside the runs, and deliver records to it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refrain.engines.accounting.names import (
    MAX_DATASET_CHARACTERS,
    MAX_TAG_CHARACTERS,
    distinct_text,
    tracked_name,
    tracked_text,
)
from refrain.engines.private import tighten
from refrain.engines.tracking.logged_models import add_validation, log_model
from refrain.engines.tracking.mlflow_run import MlflowRun, may_pass
from refrain.engines.tracking.outbox import Record, ServerAway

MLFLOW_PAGE = "REFRAIN_MLFLOW_PAGE"
"""Environment variable with the address of MLflow's page, for runs that write to MLflow's files
instead of a server. A run's pages link to this address."""
MAX_TABLES = 60
"""Most tables of a run that MLflow's page shows as tables; it shows older ones as JSON. One tag of
at most 8,000 characters has all their names."""
MAX_SOURCE_CHARACTERS = 60_000
"""Longest list of a data set's files. MLflow accepts 65,535 characters."""
_TABLES_TAG = "mlflow.loggedArtifacts"


class Deliverer:
    """Delivers the records of one MLflow run. Delivering a record twice does no harm."""

    def __init__(self, client: Any, run: MlflowRun) -> None:
        self._client, self._run = client, run
        self._tables: list[str] | None = None

    def __call__(self, record: Record) -> None:
        """Deliver a record. Raise `ServerAway` if a later try may succeed, else MLflow's error."""
        from mlflow.exceptions import MlflowException

        try:
            self._run.make_sure()
            self._deliver(record)
        except (MlflowException, OSError) as error:
            if may_pass(error):
                raise ServerAway(str(error)) from error
            raise self._run.explain(error) from error

    def is_up(self) -> bool:
        """Return whether the server answers."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.search_experiments(max_results=1)
        except (MlflowException, OSError):
            return False
        return True

    def _deliver(self, record: Record) -> None:
        client, run_id, values = self._client, self._run.run_id, record.values
        match record.kind:
            case "metrics":
                log_metrics(client, run_id, **values)
            case "tags":
                for name, value in values.items():
                    text = tracked_text(value, MAX_TAG_CHARACTERS)
                    client.set_tag(run_id, tracked_name(name), text)
            case "file" | "table":
                client.log_artifact(run_id, str(record.file), values["folder"])
                if record.kind == "table":
                    self._show_table(str(Path(values["folder"] or "", values["name"])))
            case "inputs":
                client.log_inputs(run_id, [_dataset(**one) for one in values["datasets"]])
            case "model":
                log_model(client, run_id, **values)
            case "validated":
                add_validation(client, run_id, **values)
            case "status":
                if values["status"] == "RUNNING":
                    client.update_run(run_id, **values)
                else:
                    client.set_terminated(run_id, **values)
            case _:
                raise AssertionError(f"unknown kind of record: {record.kind}")

    def _show_table(self, path: str) -> None:
        """Add a table to the tag that makes MLflow's page show it.

        `MlflowClient.log_table` would append to an existing table, and fail when the tag is full.
        """
        if self._tables is None:
            tags = self._client.get_run(self._run.run_id).data.tags
            self._tables = [entry["path"] for entry in json.loads(tags.get(_TABLES_TAG, "[]"))]
        if path not in self._tables:
            self._tables = [*self._tables, path][-MAX_TABLES:]
            entries = [{"path": path, "type": "table"} for path in self._tables]
            self._client.set_tag(self._run.run_id, _TABLES_TAG, json.dumps(entries))


def _dataset(name: str, digest: str, context: str, files: list[str], num_rows: int) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"uri": files})
    if len(source) > MAX_SOURCE_CHARACTERS:
        source = json.dumps({"uri": files[:1], "num_files": len(files)})
    dataset = Dataset(
        name=distinct_text(name, MAX_DATASET_CHARACTERS),
        digest=digest,
        source_type="local",
        source=source,
        profile=json.dumps({"num_rows": num_rows}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def log_metrics(
    client: Any, run_id: str, metrics: Mapping[str, float], step: int, at_ms: int
) -> None:
    """Log metrics of a step. `at_ms`: Unix time in milliseconds."""
    from mlflow.entities import Metric

    values = [Metric(tracked_name(name), value, at_ms, step) for name, value in metrics.items()]
    client.log_batch(run_id, values)


def open_client(runs_dir: Path, tracking_uri: str | None) -> tuple[Any, Path | None]:
    """Return an MLflow client and the directory for artifacts (None: MLflow's choice). Without a
    URI, both are beside the runs."""
    from mlflow import MlflowClient

    if tracking_uri:
        return MlflowClient(tracking_uri), None
    runs_dir = runs_dir.absolute()
    tighten(runs_dir / "mlflow.db", runs_dir / "mlflow-artifacts")
    return MlflowClient(f"sqlite:///{runs_dir}/mlflow.db"), runs_dir / "mlflow-artifacts"


def require_server(tracking_uri: str | None) -> None:
    """Raise ValueError when the URI names a server that does not answer."""
    if not tracking_uri or not tracking_uri.startswith("http"):
        return
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        MlflowClient(tracking_uri).search_experiments(max_results=1)
    except MlflowException as error:
        raise ValueError(
            f"MLFLOW_TRACKING_URI is {tracking_uri}, but MLflow does not answer there: {error}. "
            "Start the server, name another one, or unset the variable to record beside the runs"
        ) from error
