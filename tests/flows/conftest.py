"""A run that others are compared with."""

import os
from pathlib import Path

import pytest

from tests.flows.commands import Command, write_config


@pytest.fixture(scope="package")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two engines, not interrupted; returns the run's directory."""
    directory = tmp_path_factory.mktemp("whole")
    # On a fast machine it is over before the 10 s that MLflow's monitors wait by default.
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environment["MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"] = "1"
    command = Command("train", write_config(directory), environment=environment)
    try:
        output = command.finish()
    finally:
        command.close()
    assert "validation reward" in output
    return directory / "runs" / "demo"
