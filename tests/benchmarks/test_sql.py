"""`refrain bench sql` at reduced size: the store answers queries while steps go on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from refrain.flows.cli import main
from tests.conftest import REPOSITORY


@pytest.mark.engine
@pytest.mark.slow
def test_questions_are_answered_while_steps_go_on(tmp_path: Path) -> None:
    report = tmp_path / "sql.json"
    arguments = ["--steps", "4", "--rollouts", "64", "--tokens", "16"]
    # Run it in another process, because it starts its own Ray.
    command = [sys.executable, "-m", "refrain.flows.cli", "bench", "sql", *arguments]
    done = subprocess.run(
        [*command, "--json", report], cwd=REPOSITORY, capture_output=True, text=True, timeout=300.0
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert [bool(row["num_questions"]) for row in found["rows"]] == [False, True, False, True]
    assert 0.0 < found["figures"]["answer_s"] <= found["figures"]["longest_answer_s"]
    assert found["figures"]["slowdown"] > 0.0


@pytest.mark.parametrize("arguments", [("--steps", "3"), ("--steps", "2"), ("--rollouts", "9")])
def test_odd_numbers_are_refused(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(main, ["bench", "sql", *arguments]).exit_code == 2
