"""Fixtures that run `refrain`: one reference run for all tests, and commands of single tests."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flows.commands import Command, write_config


@pytest.fixture(scope="package")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the small demo with two engines to its end, and return the run's directory."""
    directory = tmp_path_factory.mktemp("whole")
    # MLflow samples system metrics every 10 s by default. A fast machine is done before that.
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environment["MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"] = "1"
    command = Command("train", write_config(directory), environment=environment)
    try:
        output = command.finish()
    finally:
        command.close()
    assert "validation reward" in output
    assert output.count("When prompts return, drafts will give about") == 1
    return directory / "runs" / "demo"


@pytest.fixture
def refrain() -> Iterator[Any]:
    """Return a function that starts a command. The commands are killed after the test."""
    commands: list[Command] = []

    def start(*args: str | Path) -> Command:
        commands.append(Command(*args))
        return commands[-1]

    yield start
    for command in commands:
        command.close()
