"""A real evaluation of a finished run, and `refrain show` and `refrain export` on it."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.flows.commands import Command
from tests.flows.test_train import NUM_STEPS, query

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SAMPLES = (
    "SELECT prompt_key, sample_index, response_token_ids, finish_reason, reward "
    "FROM rollouts JOIN rewards USING (split, step, prompt_key, sample_index) "
    f"WHERE split = 'validation' AND step = {NUM_STEPS} ORDER BY ALL"
)


def refrain(*args: str | Path) -> str:
    command = Command(*args)
    try:
        return command.finish()
    finally:
        command.close()


def last_metrics(run_dir: Path) -> dict[str, float]:
    run_id = json.loads((run_dir / "mlflow.json").read_text())["run_id"]
    return MlflowClient(f"sqlite:///{run_dir.parent}/mlflow.db").get_run(run_id).data.metrics


@pytest.mark.slow
def test_a_checkpoint_does_as_in_its_runs_validation(whole_run: Path, tmp_path: Path) -> None:
    """All samples are equal, although the evaluation has another number of engines and loads the
    weights from disk."""
    runs, file = whole_run.parent, tmp_path / "figures.json"
    output = refrain(
        *("evaluate", "demo", "rollout.num_engines=1", "--runs-dir", runs),
        *("--name", "last", "--log-to-run", "--json", file),
    )
    assert "mean@2" in output
    assert query(runs / "evaluations" / "last", SAMPLES) == query(whole_run, SAMPLES)
    report = json.loads(file.read_text())
    (source,) = report["sources"]
    assert (source["num_prompts"], report["policy_version"]) == (8, NUM_STEPS)
    summary = json.loads((whole_run / "summary.json").read_text())
    assert report["reward_mean"] == summary["validation_last"]
    metrics = last_metrics(whole_run)
    for name, value in source["figures"].items():
        key = f"{source['data_source']}/{name.replace('@', '_at_')}"
        assert metrics[f"validation/{key}"] == metrics[f"evaluation/validation/{key}"] == value


def test_a_run_that_has_ended_is_shown_and_exported(whole_run: Path, tmp_path: Path) -> None:
    shown = refrain("show", "demo", "--runs-dir", whole_run.parent)
    assert "demo: finished" in shown
    assert f"{NUM_STEPS}/{NUM_STEPS}" in shown
    trace = tmp_path / "trace.json"
    refrain("export", whole_run, "--trace", trace)
    events = json.loads(trace.read_text())["traceEvents"]
    rollouts = [event for event in events if event["ph"] == "b"]
    ((num_rollouts,),) = query(whole_run, "SELECT count(*) FROM rollouts")
    assert len(rollouts) == num_rollouts
    spans = {event["name"] for event in events if event["ph"] == "X"}
    assert {f"rollout train/{NUM_STEPS}", f"sync train/{NUM_STEPS}"} <= spans
