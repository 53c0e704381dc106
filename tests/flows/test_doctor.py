"""`refrain doctor` on this machine, and on made-up machines."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import refrain.flows.doctor
from refrain.flows.cli import main
from refrain.schemas.machine import MachineReport
from tests.machine.machines import READY, gpu_machine

WIDE = {"COLUMNS": "250"}


def doctor(*args: object) -> Any:
    return CliRunner().invoke(main, ["doctor", *map(str, args)], env=WIDE)


def test_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    done = doctor("--runs-dir", tmp_path / "runs" / "deep", "--json", file)
    report = MachineReport.model_validate_json(file.read_text())
    assert done.exit_code == int(report.has_problem), done.output
    lines = {finding.what: finding for finding in report.findings}
    assert f"at {tmp_path / 'runs' / 'deep'}" in lines["disk of runs"].found
    for finding in report.findings:
        assert finding.what in done.output
        assert finding.verdict in done.output
    packages = {package.name: package for package in report.machine.packages}
    assert packages["ray"].required == f"=={packages['ray'].installed}"
    assert packages["torch"].fits
    assert not {"pytest", "ruff"} & set(packages), "development tools are listed"


def test_standard_output_holds_only_the_json() -> None:
    done = doctor("--json", "-")
    assert json.loads(done.stdout)["machine"]["memory_bytes"] > 0
    assert "host memory" in done.stderr


def test_a_port_in_use_and_by_whom(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        done = doctor("--runs-dir", tmp_path, "--prefect-port", number)
    (line,) = [line for line in done.output.splitlines() if f"port {number}" in line]
    assert "(process " in line
    assert "refrain ui --prefect-port N" in line


@pytest.mark.parametrize(
    ("changes", "status", "last"),
    [
        ({}, 0, "All is well."),
        ({"open_files": 100}, 0, "problems: 0, warnings: 1"),
        (
            {"cuda": READY.model_copy(update={"cuda_version": (12, 4)}), "open_files": 100},
            1,
            "problems: 1, warnings: 1",
        ),
    ],
)
def test_a_problem_is_in_the_exit_status(
    changes: dict[str, Any], status: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refrain.flows.doctor, "inspect_machine", lambda *_: gpu_machine(**changes))
    done = doctor()
    assert done.exit_code == status, done.output
    assert done.output.splitlines()[-1] == last
