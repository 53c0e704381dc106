"""`refrain ui` refuses what it cannot serve. The tests in `tests/browser` try what it serves."""

import os
import socket
from pathlib import Path
from unittest import mock

import pytest
from filelock import FileLock

from refrain.flows.ui import serve, services
from refrain.schemas.config import TrainConfig
from refrain.schemas.reward import JSON_ONLY, FunctionReward
from tests.conftest import REPOSITORY


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def test_a_port_in_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port {port} .* --prefect-port"):
            serve(tmp_path, port, port)


def test_runs_are_served_once(tmp_path: Path) -> None:
    (tmp_path / ".prefect").mkdir()
    with (
        mock.patch.dict(os.environ),
        FileLock(tmp_path / ".prefect" / "ui.lock"),
        pytest.raises(ValueError, match=r"serves the runs in .* already"),
        services(tmp_path, *free_ports()),
    ):
        pass


def test_ui_wants_the_projects_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"prefect\.yaml"):
        serve(tmp_path, *free_ports())


def test_the_form_has_a_field_for_everything() -> None:
    """The config must have no union: Prefect edits unions as JSON text, which the form's JSON view
    then refuses."""
    assert "oneOf" not in repr(TrainConfig.model_json_schema())
    reward = TrainConfig.model_json_schema()["properties"]["reward"]
    assert reward["properties"].keys() == FunctionReward.model_fields.keys() - set(JSON_ONLY)
