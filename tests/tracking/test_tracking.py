"""A run in MLflow, and its resumption into the same MLflow run. Uses real MLflow on SQLite."""

import errno
import json
import math
import shutil
import time

import pytest
from mlflow import MlflowClient

from refrain.engines.failures import Failures
from refrain.engines.reports.trace_events import read_timeline, read_timelines
from refrain.engines.tracking.mlflow_client import MAX_TABLES, require_server
from refrain.engines.tracking.tracker import Tracker, add_to_run
from refrain.schemas.config import TrainConfig
from refrain.schemas.rollout import RequestId, Split
from refrain.schemas.timeline import (
    Activity,
    MoveKind,
    MoveRecord,
    RecordedTimeline,
    Span,
    Timeline,
)
from refrain.tasks.run.end_killed import end_killed
from refrain.tasks.run.run_dir import claim_run_dir
from tests.accounting.test_names import HOSTILE

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory):
    """Return an empty MLflow database. It is shared, because MLflow takes 8 s to make one."""
    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def config(tmp_path, empty_database):
    shutil.copy(empty_database, tmp_path)
    values = {"model": {"path": "m"}, "data": {"train": ["d"]}, "runs_dir": tmp_path}
    config = TrainConfig.model_validate(values)
    config.run_dir.mkdir()
    return config


@pytest.fixture
def client(config):
    return MlflowClient(f"sqlite:///{config.runs_dir}/mlflow.db")


def test_resumed_run_continues_its_mlflow_run(config, client):
    first = Tracker(config, None)
    first.log_metrics({"critic/score/mean": 0.25}, step=1)
    first.log_table("rollouts", "train-00002", [{"prompt": "p", "reward": 0.0}])
    first.close("KILLED")
    second = Tracker(config, None)
    assert second.run_id == first.run_id
    second.log_metrics({"critic/score/mean": 0.5}, step=2)
    second.log_table("rollouts", "train-00002", [{"prompt": "p", "reward": 1.0}])
    second.close("FINISHED")
    history = client.get_metric_history(first.run_id, "critic/score/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5)]
    run = client.get_run(first.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["rollout.num_engines"] == "1"
    rows = rows_of(client, first, "rollouts/train-00002.json")
    assert rows == [{"prompt": "p", "reward": 1.0}], "a repeated step must have one table"


def test_a_long_run_has_more_tables_than_fit_a_tag(config, client):
    tracker = Tracker(config, None)
    for step in range(1, MAX_TABLES + 11):
        tracker.log_table("rollouts", f"train-{step:05d}", [{"step": step}])
    tracker.close("FINISHED")
    shown = json.loads(client.get_run(tracker.run_id).data.tags["mlflow.loggedArtifacts"])
    assert len(shown) == MAX_TABLES
    assert shown[-1] == {"path": f"rollouts/train-{MAX_TABLES + 10:05d}.json", "type": "table"}
    assert len(client.list_artifacts(tracker.run_id, "rollouts")) == MAX_TABLES + 10
    # Check that the largest list fits MLflow's limit on tags.
    longest = {"path": f"timelines/validation-{99999}.json", "type": "table"}
    assert len(json.dumps([longest] * MAX_TABLES)) < 8000


def test_a_step_has_a_page_and_tables(config, client):
    tracker = Tracker(config, None)
    move = MoveRecord(RequestId(Split.TRAIN, 1, "p", 0), 0, 1, MoveKind.MIGRATED, 11.0, 7)
    span = Span(0, Activity.ROLLOUT, "train/1", 10.0, 13.0)
    tracker.log_timeline(Timeline(10.0, 14.0, (0, 1), (span,), (move,)), "train-00001")
    kept = read_timeline(config.run_dir, "train-00001")
    tracker.log_timeline_page(kept, "train-00001", [], {0: (0,)})
    tracker.close("FINISHED")
    (recorded,) = read_timelines(config.run_dir)
    assert recorded.timeline.spans == (span,)
    assert recorded.unix_s(time.monotonic()) == pytest.approx(time.time(), abs=1.0)
    (row,) = rows_of(client, tracker, "moves/train-00001.json")
    assert (row["request"], row["from_engine"], row["to_engine"]) == ("train/1/p/0", 0, 1)
    rows = rows_of(client, tracker, "timelines/train-00001.json")
    assert [(row["engine"], row["rollout_s"], row["idle_share"]) for row in rows] == [
        (0, 3.0, 0.25),
        (1, 0.0, 1.0),
        ("all", 3.0, 0.625),
    ]
    timelines = {file.path for file in client.list_artifacts(tracker.run_id, "timelines")}
    assert timelines == {f"timelines/train-00001.{kind}" for kind in ("json", "html")}


def test_known_run_delivers_later_without_a_server(config, client):
    tracker = Tracker(config, None)
    tracker.close("KILLED")
    said = []
    away = Tracker(config, "http://127.0.0.1:9", Failures(config.run_dir, said.append))
    away.log_metrics({"critic/score/mean": 0.5}, step=1)
    away._outbox.close(0.0)
    (sentence,) = away.missing()
    assert "2 records for MLflow wait" in sentence
    back = Tracker(config, None)
    back.close("FINISHED")
    assert back.missing() == []
    history = client.get_metric_history(tracker.run_id, "critic/score/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.5)]


def test_missing_server_is_refused_immediately():
    require_server(None)
    with pytest.raises(ValueError, match=r"MLFLOW_TRACKING_URI is http://127.0.0.1:9"):
        require_server("http://127.0.0.1:9")


def rows_of(client, tracker, path):
    return table_rows(client.download_artifacts(tracker.run_id, path))


def table_rows(path):
    """Return the rows of a table's file."""
    with open(path) as file:
        written = json.load(file)
    return [dict(zip(written["columns"], row, strict=True)) for row in written["data"]]


def test_no_name_and_no_text_is_refused(config, client):
    tracker = Tracker(config, None)
    tracker.log_metrics({f"validation/{name}/mean_at_4": 1.0 for name in HOSTILE}, step=1)
    tracker.log_metrics({"nan": math.nan, "inf": math.inf}, step=1)
    tracker.log_tags({f"changed/{name}": name * 9000 for name in HOSTILE})
    dataset = {"digest": "0123", "context": "training", "num_rows": 7}
    for name in HOSTILE:
        files = [name] * 9000
        tracker.log_datasets([dataset | {"name": name * 3 or "none", "files": files}])
    tracker.log_table("rollouts", "train-00001", [{"response": name} for name in HOSTILE])
    tracker.close("FINISHED")
    assert tracker.missing() == []
    metrics = client.get_run(tracker.run_id).data.metrics
    assert sum(name.endswith("/mean_at_4") for name in metrics) == len(HOSTILE)


def test_records_refused_by_mlflow_do_not_end_runs(config, record_failures, client):
    """Values that are no JSON and pages that cannot be drawn end nothing either."""
    said = []
    tracker = Tracker(config, None, Failures(config.run_dir, said.append))
    tracker.log_metrics({"x": None}, step=1)
    tracker.log_tags({"a": object()})
    empty = RecordedTimeline(Timeline(10.0, 14.0, (0,), ()), 0.0)
    tracker.log_timeline_page(empty, "train-00001", [object()], {})
    tracker.log_metrics({"y": 1.0}, step=1)
    tracker.close("FINISHED")
    assert {what for what, _ in record_failures} == {
        "delivering metrics to MLflow",
        "writing tags for MLflow",
        "pages of timelines",
    }
    record_failures.clear()
    assert len(said) == 3
    assert "1 records that MLflow refused" in tracker.missing()[0]
    run = client.get_run(tracker.run_id)
    assert (run.data.metrics, run.info.status) == ({"y": 1.0}, "FINISHED")


def test_run_deleted_in_mlflow_continues(config, record_failures, client):
    """The process keeps its records. The next process makes a new run, which receives them too."""
    said = []
    first = Tracker(config, None, Failures(config.run_dir, said.append))
    first.log_metrics({"x": 1.0}, step=1)
    first._outbox.flush(20.0)
    client.delete_run(first.run_id)
    for step in (2, 3):
        first.log_metrics({"x": float(step)}, step=step)
    first.close("FAILED")
    assert {str(error).startswith(f"MLflow run {first.run_id}") for _, error in record_failures}
    assert len(said) == 2, "metrics and the status must be reported once each"
    assert "was deleted" in said[0]
    record_failures.clear()
    second = Tracker(config, None, Failures(config.run_dir, said.append))
    second.log_metrics({"x": 4.0}, step=4)
    second.close("FINISHED")
    assert second.missing() == []
    assert "a new one" in said[-1]
    run = client.get_run(second.run_id)
    assert run.data.tags["refrain.replaces"] == first.run_id != second.run_id
    assert run.info.run_name == config.name
    assert run.data.params["rollout.num_engines"] == "1"
    assert [m.step for m in client.get_metric_history(second.run_id, "x")] == [2, 3, 4]
    assert json.loads((config.run_dir / "mlflow.json").read_text())["run_id"] == second.run_id


def test_a_full_disk_makes_one_mlflow_run(config, monkeypatch, record_failures, client):
    with monkeypatch.context() as full:
        full.setattr("refrain.engines.tracking.mlflow_run.write_durably", no_room)
        tracker = Tracker(config, None, Failures(config.run_dir, lambda _: None))
    tracker.log_metrics({"x": 1.0}, step=1)
    tracker.close("FINISHED")
    assert {what for what, _ in record_failures} == {"writing mlflow.json"}
    record_failures.clear()
    (run,) = client.search_runs([tracker.experiment_id])
    assert run.data.metrics == {"x": 1.0}


def no_room(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_deleted_experiment_gets_a_successor(config, record_failures, client):
    first = Tracker(config, None)
    first._outbox.flush(20.0)
    client.delete_experiment(first.experiment_id)
    first.close("FAILED")
    assert record_failures
    record_failures.clear()
    for config_now in (config, config.model_copy(update={"name": "another"})):
        config_now.run_dir.mkdir(exist_ok=True)
        tracker = Tracker(config_now, None, Failures(config.run_dir, lambda _: None))
        tracker.close("FINISHED")
        assert client.get_experiment(tracker.experiment_id).name == "refrain 2"
        assert client.get_run(tracker.run_id).info.status == "FINISHED"


def test_a_run_that_was_killed_is_ended_unless_it_lives(config, client):
    def status() -> str:
        return client.get_run(run_id).info.status

    end_killed(config.run_dir, config.runs_dir)  # Nothing is there yet.
    lock = claim_run_dir(config, resume=False)
    run_id = Tracker(config, None).run_id
    end_killed(config.run_dir, config.runs_dir)
    assert status() == "RUNNING"
    lock.release()
    end_killed(config.run_dir, config.runs_dir)
    assert status() == "KILLED"
    Tracker(config, None).close("FINISHED")
    end_killed(config.run_dir, config.runs_dir)
    assert status() == "FINISHED"


def test_an_evaluation_has_an_experiment_of_its_own_beside_the_runs(config, client):
    trained = Tracker(config, None)
    trained.close("FINISHED")
    values = config.model_dump() | {"name": "e", "runs_dir": config.runs_dir / "evaluations"}
    evaluation = TrainConfig.model_validate(values)
    claim_run_dir(evaluation, resume=False).release()
    where = {"experiment": "refrain evaluations", "runs_dir": config.runs_dir}
    run_id = Tracker(evaluation, None, **where).run_id
    end_killed(evaluation.run_dir, config.runs_dir)
    add_to_run(config.run_dir, None, {"evaluation/d/s/mean_at_2": 0.5}, 4)
    assert not (config.runs_dir / "evaluations" / "mlflow.db").exists()
    run, of_training = client.get_run(run_id), client.get_run(trained.run_id)
    assert run.info.status == "KILLED"
    assert run.info.experiment_id != of_training.info.experiment_id
    assert of_training.data.metrics == {"evaluation/d/s/mean_at_2": 0.5}
    with pytest.raises(ValueError, match="no run in MLflow"):
        add_to_run(config.runs_dir, None, {}, 4)


def test_a_checkpoint_is_a_model_with_its_validation(config, client):
    """The first checkpoint is saved before its validation. The second is saved after it, and
    recorded twice. The third has no validation."""
    tracker = Tracker(config, None)
    for step, saved_first in ((2, True), (4, False)):
        for kind in ("saved", "validated") if saved_first else ("validated", "saved"):
            if kind == "saved":
                tracker.log_checkpoint(step, {"refrain.path": f"global_step_{step}"})
            else:
                tracker.log_metrics({"validation/reward": step / 8, "critic/x": 1.0}, step)
                tracker.log_validated(step)
    tracker.log_checkpoint(4, {"refrain.path": "global_step_4"})
    tracker.log_checkpoint(6, {"refrain.path": "global_step_6"})
    tracker.close("FINISHED")
    found = client.search_logged_models([client.get_run(tracker.run_id).info.experiment_id])
    told = {
        model.name: (
            model.tags["refrain.path"],
            {metric.key: metric.value for metric in model.metrics or ()},
        )
        for model in found
    }
    assert len(found) == len(told) == 3
    assert told == {
        "step-2": ("global_step_2", {"validation/reward": 0.25}),
        "step-4": ("global_step_4", {"validation/reward": 0.5}),
        "step-6": ("global_step_6", {}),
    }
    assert {model.source_run_id for model in found} == {tracker.run_id}
    history = client.get_metric_history(tracker.run_id, "validation/reward")
    assert [(m.step, m.value) for m in history] == [(2, 0.25), (4, 0.5)]


def test_data_sets_and_experiment_are_logged(config, client, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    tracker = Tracker(config, None)
    dataset = {"name": "train", "digest": "0123", "context": "training", "files": ["train.parquet"]}
    for _ in range(2):
        tracker.log_datasets([dataset | {"num_rows": 7}])
    tracker.close("FINISHED")
    run = client.get_run(tracker.run_id)
    assert client.get_experiment(run.info.experiment_id).name == "mine"
    (given,) = run.inputs.dataset_inputs
    assert (given.dataset.name, given.dataset.digest) == ("train", "0123")
    assert json.loads(given.dataset.profile) == {"num_rows": 7}
    assert [(tag.key, tag.value) for tag in given.tags] == [("mlflow.data.context", "training")]
