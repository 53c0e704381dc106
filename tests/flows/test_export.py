"""`refrain export` on the directory of a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from filelock import FileLock

from refrain.engines.reports.trace_events import write_timeline
from refrain.engines.store.rows import rollout_rows
from refrain.engines.store.store import Store
from refrain.flows.cli import main
from refrain.tasks.run.run_dir import LOCK_FILE
from tests.flows.run_dirs import make_run
from tests.reports.test_trace_events import FIRST
from tests.store.test_store import make_rollout


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = make_run(tmp_path, "done")
    write_timeline(run_dir, "train-00001", FIRST)
    with Store(run_dir / "refrain.duckdb") as store:
        store.add_rollouts(rollout_rows([make_rollout()]), 0)
    return run_dir


def export(*args: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["export", *map(str, args)])
    return done.exit_code, done.output


def test_export_writes_both_kinds_at_once(run_dir: Path, tmp_path: Path) -> None:
    rows, trace = tmp_path / "rows.parquet", tmp_path / "trace.json"
    status, output = export(run_dir, rows, "--trace", trace)
    assert status == 0, output
    assert rows.exists()
    kinds = [event["ph"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert (kinds.count("X"), kinds.count("b")) == (3, 1)
    assert "ui.perfetto.dev" in output


def test_a_live_runs_trace_is_without_rollouts(run_dir: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with FileLock(run_dir / LOCK_FILE):
        status, output = export(run_dir, "--trace", trace)
    assert (status, "without rollouts" in output) == (0, True)
    assert "b" not in [event["ph"] for event in json.loads(trace.read_text())["traceEvents"]]


def page_of(file: Path) -> dict:
    return json.loads(file.read_text().split('id="data">')[1].split("</script>")[0])


def test_a_steps_page_has_its_requests(run_dir: Path, tmp_path: Path) -> None:
    rollout = make_rollout(prompt="in the window")
    with Store(run_dir / "refrain.duckdb") as store:
        store.add_rollouts(rollout_rows([replace(rollout, started_s=1010.5, finished_s=1012.5)]), 0)
    html = tmp_path / "step.html"
    status, output = export(run_dir, "--timeline", "1", html)
    assert (status, "1 requests" in output) == (0, True), output
    data = page_of(html)
    assert (data["title"], data["prompts"]) == ("done: train step 1", ["in the window"])
    assert data["stays"] == [[0, 0, 0.5, 2.5, 0, 0]]
    with FileLock(run_dir / LOCK_FILE):
        status, output = export(run_dir, "--timeline", "1", html)
    assert (status, "without requests" in output) == (0, True)
    assert page_of(html)["stays"] == []


def test_impossible_exports_are_refused(run_dir: Path, tmp_path: Path) -> None:
    status, output = export(run_dir)
    assert (status, "--trace FILE.json" in output) == (2, True)
    status, output = export(run_dir, "--trace", tmp_path / "none" / "trace.json")
    assert (status, "no such directory" in output) == (2, True)
    status, output = export(run_dir, "--timeline", "7", tmp_path / "step.html")
    assert (status, "Available timelines: train-00001" in output) == (2, True)
    (run_dir / "timelines" / "train-00001.json").unlink()
    status, output = export(run_dir, "--trace", tmp_path / "trace.json")
    assert (status, "has no timeline" in output) == (2, True)
