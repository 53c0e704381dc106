"""The MLflow run of a training run: made once, found again, and replaced when it was deleted.

    runs/NAME/mlflow.json    which one it is

A process of the run that finds it deleted makes a new one of the same name, with the tag
`refrain.replaces`. One that is deleted while the process goes on stays deleted: whoever deleted it
wants no other to turn up at once. Its records are set aside until the run is resumed.
"""

import json
from http import HTTPStatus
from pathlib import Path
from typing import Any

from engines.accounting.names import (
    MAX_EXPERIMENT_CHARACTERS,
    MAX_PARAMETER_CHARACTERS,
    distinct_text,
    tracked_name,
    tracked_text,
)
from engines.durable import write_durably
from engines.failures import Failures
from schemas.config import TrainConfig

RUN_FILE = "mlflow.json"
"""Names a run's MLflow run, in the run's directory."""
REPLACES = "refrain.replaces"
"""Tag with the id of the MLflow run that was deleted."""
_ACTIVE = "active"


class RunDeleted(RuntimeError):
    """The MLflow run of a training run was deleted."""


class MlflowRun:
    """The MLflow run that a training run writes to."""

    def __init__(
        self,
        client: Any,
        config: TrainConfig,
        experiment: str,
        artifacts: Path | None,
        failures: Failures,
    ) -> None:
        """Asks no server. `artifacts`: where those of a new experiment go, by default where MLflow
        wants."""
        self._client, self._config = client, config
        self._experiment = distinct_text(experiment, MAX_EXPERIMENT_CHARACTERS)
        self._artifacts = artifacts
        self._failures = failures
        self._file = config.run_dir / RUN_FILE
        self._names: dict[str, str] = {}
        with failures.contained(f"reading {RUN_FILE}"):
            if self._file.exists():
                known = json.loads(self._file.read_text())
                self._names = {name: str(known[name]) for name in ("run_id", "experiment_id")}
        self._is_sure, self._is_described = False, True

    @property
    def run_id(self) -> str:
        """Empty before it was made."""
        return self._names.get("run_id", "")

    @property
    def experiment_id(self) -> str:
        return self._names.get("experiment_id", "")

    def make(self) -> None:
        """Make the run where there is none. Raises what MLflow raises."""
        if not self._names:
            self._create({})
            self._is_sure = True

    def make_sure(self) -> None:
        """Make the run where there is none, or where it was deleted before this process first
        asked. Raises what MLflow raises."""
        self.make()
        if not self._is_sure and self._is_gone():
            deleted = self.run_id
            self._create({REPLACES: deleted})
            self._failures.warn(
                f"this run's MLflow run {deleted} was deleted: a new one, {self.run_id}, has what "
                "comes from here on"
            )
        self._is_sure = True
        if not self._is_described:
            self._describe()

    def explain(self, error: Exception) -> Exception:
        """The error, or that the run was deleted where this explains it."""
        from mlflow.exceptions import MlflowException

        try:
            is_gone = self._is_gone()
        except (MlflowException, OSError):
            return error
        if not is_gone:
            return error
        return RunDeleted(
            f"MLflow run {self.run_id} was deleted. Restore it (mlflow runs restore --run-id "
            f"{self.run_id}) and resume, or only resume: then a new one takes its place"
        )

    def _is_gone(self) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(self.run_id).info.lifecycle_stage != _ACTIVE
        except MlflowException as error:
            if status_of(error) == HTTPStatus.NOT_FOUND:
                return True
            raise

    def _create(self, tags: dict[str, str]) -> None:
        client, config = self._client, self._config
        experiment = experiment_id(client, self._experiment, self._artifacts)
        run_id = client.create_run(experiment, tags=tags, run_name=config.name).info.run_id
        self._names = {"run_id": run_id, "experiment_id": experiment}
        self._is_described = False
        with self._failures.contained(f"writing {RUN_FILE}"):
            write_durably(self._file, json.dumps(self._names))

    def _describe(self) -> None:
        """Give a new run its settings. Raises what MLflow raises, where it may take them later."""
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        params = [
            Param(tracked_name(name), tracked_text(str(value), MAX_PARAMETER_CHARACTERS))
            for name, value in _flat_params(self._config).items()
        ]
        try:
            self._client.log_batch(self.run_id, params=params)
            config = self._config.model_dump(mode="json")
            self._client.log_dict(self.run_id, config, "config.json")
        except (MlflowException, OSError) as error:
            if may_pass(error):
                raise
            self._failures.add("the settings in MLflow", error)
        self._is_described = True


def experiment_id(client: Any, name: str, artifacts: Path | None) -> str:
    """Id of the experiment with this name, which is made when it is missing. One that was deleted
    keeps its name: then it is the first of `NAME 2`, `NAME 3` ... that is not deleted."""
    from mlflow.exceptions import MlflowException

    location = artifacts.as_uri() if artifacts else None
    number, free = 1, name
    while True:
        experiment = client.get_experiment_by_name(free)
        if experiment is None:
            try:
                return client.create_experiment(free, artifact_location=location)
            except MlflowException:
                # Another process may have made it just now.
                if client.get_experiment_by_name(free) is None:
                    raise
        elif experiment.lifecycle_stage == _ACTIVE:
            return experiment.experiment_id
        else:
            number += 1
            free = f"{name} {number}"


def status_of(error: Exception) -> int | None:
    """HTTP status of an error of MLflow's client; None where no server has answered."""
    from mlflow.exceptions import MlflowException
    from requests import HTTPError

    if isinstance(error, MlflowException):
        return error.get_http_status_code()
    if isinstance(error, HTTPError) and error.response is not None:
        return error.response.status_code
    return None


def may_pass(error: Exception) -> bool:
    """Whether the same request may be accepted later."""
    status = status_of(error)
    busy = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
    return status is None or status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in busy


def _flat_params(config: TrainConfig) -> dict[str, Any]:
    """Two levels are all a config has: `trainer.learning_rate`."""
    params: dict[str, Any] = {}
    for section, value in config.model_dump(mode="json").items():
        if isinstance(value, dict):
            params |= {f"{section}.{name}": inner for name, inner in value.items()}
        else:
            params[section] = value
    return params
