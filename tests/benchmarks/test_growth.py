"""`refrain bench growth` at reduced size: late steps cost as much as early ones."""

import json

import pytest
from click.testing import CliRunner

from refrain.engines.store import archive
from refrain.flows.cli import main


@pytest.mark.slow
def test_late_steps_leave_and_keep_no_more_than_early_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "CHUNK_STEPS", 2)
    monkeypatch.setattr(archive, "KEPT_STEPS", 2)
    report = tmp_path / "growth.json"
    arguments = ["--steps", "20", "--rollouts", "8", "--tokens", "64", "--no-ray"]
    result = CliRunner().invoke(main, ["bench", "growth", *arguments, "--json", str(report)])
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_text())
    assert len(found["rows"]) == 10
    # Every second step adds four archive files. The other files that vary are MLflow's.
    assert 0.5 < found["figures"]["files_growth"] < 1.5
    assert found["figures"]["query_s_growth"] < 5
    assert "last stretch / second stretch" in result.output


@pytest.mark.parametrize("arguments", [("--steps", "41"), ("--steps", "10"), ("--rollouts", "9")])
def test_odd_numbers_are_refused(arguments):
    result = CliRunner().invoke(main, ["bench", "growth", *arguments])
    assert result.exit_code == 2
    assert "--steps is a multiple of 10 from 20 on" in result.output
