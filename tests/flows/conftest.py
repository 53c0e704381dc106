"""A run that others are compared with."""

from pathlib import Path

import pytest

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
