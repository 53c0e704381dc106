"""MLflow gets the checkpoints, the profile and the changed settings of a run."""

import pytest

from refrain.engines.learn.checkpoint import CheckpointState, write_checkpoint
from refrain.schemas.config import TrainConfig
from refrain.tasks.run.run_dir import claim_run_dir
from refrain.tasks.run.run_metadata import exactness, log_changes, log_checkpoints, log_profile


class FakeTracker:
    def __init__(self):
        self.tables, self.tags, self.files, self.checkpoints = {}, {}, {}, {}

    def log_table(self, folder, name, rows):
        self.tables[folder, name] = rows

    def log_file(self, folder, name, content):
        self.files[folder, name] = content

    def log_tags(self, tags):
        self.tags |= tags

    def log_checkpoint(self, step, tags):
        self.checkpoints[step] = tags


def test_checkpoints_are_those_that_can_be_restored(tmp_path):
    for step in (3, 12):
        state = CheckpointState(step=step, policy_version=step, loader_state={})
        write_checkpoint(tmp_path, state, lambda path: (path / "w").write_bytes(b"12345") and None)
    (tmp_path / "global_step_20").mkdir()
    tracker = FakeTracker()
    log_checkpoints(tracker, tmp_path)
    rows = tracker.tables[None, "checkpoints"]
    assert [(row["step"], row["policy_version"], row["bytes"]) for row in rows] == [
        (3, 3, 5),
        (12, 12, 5),
    ]
    assert tracker.tags == {"refrain.last_checkpoint": str(tmp_path / "global_step_12")}
    (tags,) = tracker.checkpoints.values()
    assert tags["refrain.path"] == str(tmp_path / "global_step_12")
    assert (tags["refrain.bytes"], len(tags["refrain.digest"])) == ("5", 64)


@pytest.mark.parametrize(
    ("dtype", "invariant", "on_gpus", "told"),
    [
        ("float32", False, False, "nothing"),
        ("float32", True, True, "order of additions"),
        ("bfloat16", False, True, "on the batch and on the drafts"),
        ("bfloat16", True, True, "on the number of drafts"),
        ("bfloat16", True, False, "on the batch and on the drafts"),
    ],
)
def test_record_states_what_tokens_depend_on(dtype, invariant, on_gpus, told):
    values = {
        "model": {"path": "m", "dtype": dtype},
        "data": {"train": ["d"]},
        "rollout": {"batch_invariant": invariant},
    }
    found = exactness(TrainConfig.model_validate(values), on_gpus=on_gpus)
    assert found.startswith(dtype)
    assert told in found


def test_the_profile_that_decided_is_recorded(tmp_path):
    (tmp_path / "profiles" / "mine").mkdir(parents=True)
    (tmp_path / "profiles" / "mine" / "profile.json").write_bytes(b"times")
    tracker = FakeTracker()
    values = {"model": {"path": "m"}, "data": {"train": ["d"]}, "runs_dir": str(tmp_path)}
    log_profile(tracker, TrainConfig.model_validate(values))
    assert tracker.files == {}
    log_profile(tracker, TrainConfig.model_validate(values | {"profile": "mine"}))
    assert tracker.files == {(None, "profile.json"): b"times"}


def test_changes_on_resume_are_on_the_mlflow_page(tmp_path):
    values = {"model": {"path": "m"}, "data": {"train": ["d"]}, "runs_dir": str(tmp_path)}
    config = TrainConfig.model_validate(values)
    tracker = FakeTracker()
    claim_run_dir(config, resume=False).release()
    log_changes(tracker, config)
    assert (tracker.tables, tracker.tags, tracker.files) == ({}, {}, {})
    fewer = TrainConfig.model_validate(values | {"rollout": {"num_engines": 2}})
    claim_run_dir(fewer, resume=True).release()
    log_changes(tracker, fewer)
    (row,) = tracker.tables[None, "changes"]
    assert (row["name"], row["before"], row["after"]) == ("rollout.num_engines", 1, 2)
    assert f"* {row['at']}: rollout.num_engines: 1 -> 2" in tracker.tags["mlflow.note.content"]
    assert b'"num_engines": 2' in tracker.files[None, "config.json"]
    assert tracker.tags["changed/rollout.num_engines"] == "2"
