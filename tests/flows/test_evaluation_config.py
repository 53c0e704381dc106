"""`refrain evaluate` picks a checkpoint and its settings. These tests start no engine."""

import json
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from refrain.flows.evaluation_config import find_checkpoint, find_subject
from refrain.flows.launch import read_evaluate_config
from refrain.schemas.evaluation import EvaluateConfig
from refrain.schemas.inputs import sources_of
from refrain.schemas.rollout import Split
from tests.conftest import DEMO
from tests.flows.run_dirs import make_checkpoint, make_run

DATA = "held-out.parquet"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a directory with one run. Its config has settings that an evaluation takes over, and
    others that it ignores."""
    run_dir = make_run(tmp_path, "mine")
    config = json.loads((run_dir / "config.json").read_text())
    config |= {"seed": 7, "validation_samples": 4, "staleness": 1}
    config["model"]["dtype"] = "float32"
    config["data"] |= {"validation": [DATA], "max_response_tokens": 99}
    config["rollout"] |= {"num_engines": 3, "temperature": 0.7}
    config["reward"] = {"type": "function", "path": "score.py"}
    config["pat"]["tp_degrees"] = [2]
    config["profile"] = "p"
    (run_dir / "config.json").write_text(json.dumps(config))
    for step in (2, 4):
        make_checkpoint(run_dir, step)
    return tmp_path


def subject(runs: Path, checkpoint: str | Path, **given: object):
    return find_subject(EvaluateConfig(checkpoint=str(checkpoint), runs_dir=runs, **given))


def test_a_checkpoint_is_evaluated_as_its_run_validates_it(runs: Path) -> None:
    found = subject(runs, "mine")
    config = found.config
    assert (found.policy_version, found.run_dir) == (4, (runs / "mine").absolute())
    assert config.model.path == runs / "mine" / "checkpoints" / "global_step_4" / "model"
    assert (config.model.dtype, config.seed, config.validation_samples) == ("float32", 7, 4)
    assert config.data.validation == (Path(DATA),)
    assert config.data.max_response_tokens == 99
    assert (config.rollout.num_engines, config.rollout.temperature) == (3, 0.7)
    assert config.reward.type == "function"


def test_a_checkpoint_is_evaluated_with_the_date_of_its_run(runs: Path, tmp_path: Path) -> None:
    file = runs / "mine" / "config.json"
    config = json.loads(file.read_text())
    assert subject(runs, "mine").config.data.date is None, "a date, although the run has none"
    config["data"] |= {"date": "2024-07-26T00:00:00"}
    file.write_text(json.dumps(config))
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({"data": {"validation": [DATA]}}))
    for given in ({}, {"config": str(other)}):
        data = subject(runs, "mine", **given).config.data
        assert data.date == datetime(2024, 7, 26)
    mine = subject(runs, "mine", overrides=["data.date=2024-07-27"]).config.data
    assert mine.date == datetime(2024, 7, 27)


def test_nothing_of_training_is_taken_over(runs: Path) -> None:
    config = subject(runs, "mine").config
    assert (config.staleness, config.pat.tp_degrees, config.drafting.enabled) == (0, (), False)
    assert config.profile is None
    assert config.run_dir == runs / "evaluations" / "mine-step-4-held-out"


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("mine", 4),
        ("{runs}/mine", 4),
        ("{runs}/mine/checkpoints/global_step_2", 2),
        ("{runs}/mine/checkpoints/global_step_2/model", 2),
    ],
)
def test_ways_to_name_a_checkpoint(runs: Path, name: str, version: int) -> None:
    found = find_checkpoint(name.format(runs=runs), runs)
    assert (found.policy_version, found.name) == (version, f"mine-step-{version}")
    assert found.model.parent.name == f"global_step_{version}"


def test_a_model_that_is_no_runs(runs: Path) -> None:
    found = subject(runs, DEMO / "model", data=(Path(DATA),))
    assert (found.policy_version, found.run_dir) == (0, None)
    assert (found.config.model.path, found.config.seed) == (DEMO / "model", 0)
    assert found.config.model.dtype == "bfloat16"
    like_mine = subject(runs, DEMO / "model", config="mine").config
    assert (like_mine.model.path, like_mine.model.dtype) == (DEMO / "model", "float32")
    assert (like_mine.seed, like_mine.rollout.num_engines) == (7, 3)


def test_a_file_gives_the_settings_too(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump({"rollout": {"num_engines": 5}}))
    found = subject(runs, "mine", config=str(file), data=(Path(DATA),))
    assert (found.config.rollout.num_engines, found.config.rollout.temperature) == (5, 1.0)
    assert found.policy_version == 4


def test_options_and_overrides_go_first(runs: Path) -> None:
    given = {"samples": 9, "seed": 1, "name": "other", "data": (Path("a.json"), Path("b.json"))}
    overrides = ("rollout.top_p=0.5", "data.max_response_tokens=100000")
    config = subject(runs, "mine", overrides=overrides, **given).config
    assert (config.validation_samples, config.seed, config.name) == (9, 1, "other")
    assert config.data.validation == (Path("a.json"), Path("b.json"))
    assert (config.rollout.top_p, config.data.max_response_tokens) == (0.5, 100000)
    assert subject(runs, "mine", seed=0).config.seed == 0


def test_temperature_0_takes_the_likeliest_token(runs: Path) -> None:
    rollout = subject(runs, "mine", overrides=("rollout.temperature=0",)).config.rollout
    assert (rollout.temperature, rollout.top_k) == (1.0, 1)


def test_evaluation_samples_like_validations_by_default(runs: Path) -> None:
    file = runs / "mine" / "config.json"
    config = json.loads(file.read_text())
    config["rollout"]["validation"] = {"temperature": 0.3}
    file.write_text(json.dumps(config))
    sampling = subject(runs, "mine").config.rollout.sampling(Split.VALIDATION)
    assert sampling.temperature == 0.3
    rollout = subject(runs, "mine", overrides=("rollout.top_p=0.5",)).config.rollout
    sampling = rollout.sampling(Split.VALIDATION)
    assert (sampling.temperature, sampling.top_p) == (0.7, 0.5)


def test_files_are_distinguished_from_overrides(runs: Path) -> None:
    data = [DATA, "rollout.top_p=0.5", "more.jsonl"]
    config = read_evaluate_config(data, {"checkpoint": "mine", "runs_dir": runs, "seed": None})
    assert config.data == (Path(DATA), Path("more.jsonl"))
    assert config.overrides == ("rollout.top_p=0.5",)
    with pytest.raises(ValueError, match="samples"):
        read_evaluate_config([], {"checkpoint": "mine", "samples": 0})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"checkpoint": "your"}, "no run 'your'.*mine"),
        ({"checkpoint": "no/such/directory"}, "does not exist"),
        ({"checkpoint": str(DEMO / "model")}, "no prompts to evaluate on"),
        ({"checkpoint": str(DEMO / "model"), "log_to_run": True}, "belongs to no run"),
        ({"checkpoint": "mine", "config": "your"}, "no run 'your'"),
        (
            {"checkpoint": "mine", "overrides": ("trainer.learning_rate=1",)},
            "has no effect on an evaluation",
        ),
        ({"checkpoint": "mine", "overrides": ("model.path=x",)}, "give the model as CHECKPOINT"),
        ({"checkpoint": "mine", "overrides": ("rollout.dragons=1",)}, r"rollout\.dragons"),
        ({"checkpoint": "mine", "name": "a/b"}, "name"),
    ],
)
def test_invalid_subjects_are_refused(runs: Path, given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_subject(EvaluateConfig(**given, runs_dir=runs))


def test_a_run_without_a_checkpoint(runs: Path) -> None:
    make_run(runs, "young")
    with pytest.raises(ValueError, match="no checkpoint yet"):
        subject(runs, "young")


def test_sources_keep_their_rewards(runs: Path) -> None:
    file = runs / "mine" / "config.json"
    config = json.loads(file.read_text())
    reward = {"type": "function", "path": "code.py"}
    sources = [{"name": "math", "files": DATA}, {"name": "code", "files": DATA, "reward": reward}]
    config["data"]["validation"] = sources
    file.write_text(json.dumps(config))
    found = subject(runs, "mine").config
    assert [one.name for one in sources_of(found.data.validation)] == ["math", "code"]
    assert (list(found.data.own_rewards), found.data.train_files) == (["code"], (Path(DATA),))
    assert found.name.endswith("-math-code")
