"""The MLflow run of a training run. `runs/NAME/mlflow.json` has its id.

The training run creates one MLflow run and uses it again after a resume. If a user deletes the
MLflow run, what happens depends on when:

- Before a process of the training run starts: the process creates a new MLflow run of the same
  name, with the tag `refrain.replaces`.
- While the process runs: it creates no new one at once, because the user has just deleted it. The
  outbox sets the records aside until the training run is resumed.
"""

import json
from http import HTTPStatus
from pathlib import Path
from typing import Any

from refrain.engines.accounting.names import (
    MAX_EXPERIMENT_CHARACTERS,
    MAX_PARAMETER_CHARACTERS,
    distinct_text,
    tracked_name,
    tracked_text,
)
from refrain.engines.durable import write_durably
from refrain.engines.failures import Failures
from refrain.schemas.config import TrainConfig

RUN_FILE = "mlflow.json"
"""File in a run's directory with the ids of its MLflow run."""
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
        """Read the known ids from the run's directory, without a request to a server.

        `artifacts`: location for artifacts of a new experiment, by default MLflow's choice.
        """
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
        """Id of the MLflow run; empty before it is created."""
        return self._names.get("run_id", "")

    @property
    def experiment_id(self) -> str:
        return self._names.get("experiment_id", "")

    def make(self) -> None:
        """Create the MLflow run if there is none. MLflow's errors propagate."""
        if not self._names:
            self._create({})
            self._is_sure = True

    def make_sure(self) -> None:
        """Create the MLflow run if there is none, or if it was deleted before this process's first
        request. MLflow's errors propagate."""
        self.make()
        if not self._is_sure and self._is_gone():
            deleted = self.run_id
            self._create({REPLACES: deleted})
            self._failures.warn(
                f"this run's MLflow run {deleted} was deleted. From now on records go to a new "
                f"one, {self.run_id}"
            )
        self._is_sure = True
        if not self._is_described:
            self._describe()

    def explain(self, error: Exception) -> Exception:
        """Return `RunDeleted` if the MLflow run was deleted, otherwise the error itself."""
        from mlflow.exceptions import MlflowException

        try:
            is_gone = self._is_gone()
        except (MlflowException, OSError):
            return error
        if not is_gone:
            return error
        return RunDeleted(
            f"MLflow run {self.run_id} was deleted. Resume the run to record to a new MLflow run. "
            f"To keep the old one, first run `mlflow runs restore --run-id {self.run_id}`"
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
        """Log the config to a new MLflow run. Raise MLflow's error if a later try may succeed."""
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        params = [
            Param(tracked_name(name), tracked_text(str(value), MAX_PARAMETER_CHARACTERS))
            for name, value in flat_params(self._config).items()
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
    """Return the id of the experiment with this name; create it if it is missing.

    MLflow keeps the name of a deleted experiment. In this case, use the first of `NAME 2`,
    `NAME 3` ... that is not deleted.
    """
    from mlflow.exceptions import MlflowException

    location = artifacts.as_uri() if artifacts else None
    number, free = 1, name
    while True:
        experiment = client.get_experiment_by_name(free)
        if experiment is None:
            try:
                return client.create_experiment(free, artifact_location=location)
            except MlflowException:
                # Another process may have created it since the check.
                if client.get_experiment_by_name(free) is None:
                    raise
        elif experiment.lifecycle_stage == _ACTIVE:
            return experiment.experiment_id
        else:
            number += 1
            free = f"{name} {number}"


def status_of(error: Exception) -> int | None:
    """Return the HTTP status of an error of MLflow's client, or None without an answer."""
    from mlflow.exceptions import MlflowException
    from requests import HTTPError

    if isinstance(error, MlflowException):
        return error.get_http_status_code()
    if isinstance(error, HTTPError) and error.response is not None:
        return error.response.status_code
    return None


def may_pass(error: Exception) -> bool:
    """Return whether the same request may succeed later."""
    status = status_of(error)
    busy = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
    return status is None or status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in busy


def flat_params(config: TrainConfig) -> dict[str, Any]:
    """Return the settings by dotted name, for example `trainer.learning_rate`. A config has at most
    two levels."""
    params: dict[str, Any] = {}
    for section, value in config.model_dump(mode="json").items():
        if isinstance(value, dict):
            params |= {f"{section}.{name}": inner for name, inner in value.items()}
        else:
            params[section] = value
    return params
