"""A run that others are compared with, and the servers of runs."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.overhead import local_servers
from tests.flows.commands import Command, write_config


@pytest.fixture(scope="package")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two engines, not interrupted; returns the run's directory."""
    directory = tmp_path_factory.mktemp("whole")
    command = Command("train", write_config(directory))
    try:
        output = command.finish()
    finally:
        command.close()
    assert "validation reward" in output
    return directory / "runs" / "demo"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Any]:
    """Prefect's and MLflow's, of which Prefect's settings know."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with (
        mock.patch.dict(os.environ),
        local_servers(tmp_path) as running,
        temporary_settings({PREFECT_API_URL: running.prefect_api}),
    ):
        yield running
