"""`refrain report` on a finished run."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from refrain.engines.store.store import Store
from refrain.flows.cli import main
from refrain.schemas.bench import BenchReport
from refrain.tasks.run.run_dir import CONFIG_FILE, STORE_FILE
from tests.store.test_archive import add_step


def make_run(directory: Path, steps: range) -> Path:
    """Write a run with these steps. An epoch has ten steps."""
    directory.mkdir()
    (directory / CONFIG_FILE).write_text("{}")
    with Store(directory / STORE_FILE) as store:
        for step in steps:
            add_step(store, step)
    return directory


def test_epochs_are_compared_in_tables_a_file_and_a_picture(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "mine", range(1, 25))
    picture, file = tmp_path / "report.png", tmp_path / "report.json"
    command = ["report", str(run_dir), "--png", str(picture), "--json", str(file)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    titles = ("tokens found in the last epoch", "stretches found in epoch 3", "their ranking group")
    titles += ("medians compared with the last epoch",)
    assert all(title in done.output for title in titles)
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = BenchReport.model_validate_json(file.read_text())
    assert {row["epoch"] for row in report.rows} == {1, 2, 3}
    assert 0.0 <= report.figures["found_share"] <= 1.0
    ranks = ("accurate", "not_last", "within", "outgrown")
    shares = [report.figures[f"{name}_share_8_groups"] for name in ranks]
    assert sum(shares) == pytest.approx(1.0)
    assert 0.0 <= report.figures["grown"] <= 1.0
    told = CliRunner().invoke(main, ["report", str(run_dir), "--json", "-"])
    assert json.loads(told.output)["name"] == "report"


def test_report_needs_two_epochs(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "young", range(1, 4))
    done = CliRunner().invoke(main, ["report", str(run_dir)])
    assert (done.exit_code, "needs at least two" in done.output) == (2, True)
    done = CliRunner().invoke(main, ["report", str(run_dir), "--png", "nowhere/report.png"])
    assert (done.exit_code, "--png nowhere" in done.output) == (2, True)
