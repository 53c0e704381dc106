"""`data.train` takes files or sources, and refuses what mixes both or names them alike."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from refrain.schemas.base import with_absolute_paths
from refrain.schemas.config import TrainConfig
from refrain.schemas.inputs import CurriculumConfig, DataConfig, DataSource, sources_of
from refrain.schemas.resume import changed_settings
from refrain.schemas.secret import fill_in, redacted_settings, secrets_of

MATH = {"name": "math", "files": "math.parquet", "weight": 3}
CODE = {
    "name": "code",
    "files": ["a.jsonl", "b.jsonl"],
    "reward": {"type": "function", "path": "code.py", "kwargs": {"key": "sk-1"}},
}


def make_config(**data) -> TrainConfig:
    return TrainConfig.model_validate({"model": {"path": "m"}, "data": data})


def test_files_stay_files_and_sources_keep_their_settings():
    plain = DataConfig.model_validate({"train": "a.jsonl"})
    assert plain.train == (Path("a.jsonl"),)
    assert sources_of(plain.train) == (DataSource(files=("a.jsonl",)),)
    assert (sources_of(()), plain.validation_files, plain.own_rewards) == ((), (), {})
    mixed = make_config(train=[MATH, CODE])
    assert mixed.data.train_files == (Path("math.parquet"), Path("a.jsonl"), Path("b.jsonl"))
    assert list(mixed.data.own_rewards) == ["code"]
    assert [reward.type for reward in mixed.rewards] == ["builtin", "function"]
    again = TrainConfig.model_validate_json(mixed.model_dump_json())
    (change,) = changed_settings(mixed, make_config(train=[MATH | {"weight": 1}, CODE]))
    assert (again.data.train[0], change.name) == (mixed.data.train[0], "data.train")
    there = with_absolute_paths(mixed, Path("/there"))
    assert there.data.own_rewards["code"].path == Path("/there/code.py")


def test_secrets_of_a_sources_reward_are_kept_apart():
    mixed = make_config(train=[MATH, CODE])
    recorded, secrets = mixed.model_dump(mode="json"), secrets_of(mixed)
    assert "sk-1" not in mixed.model_dump_json()
    assert redacted_settings(recorded) == ["data.train.1.reward.kwargs.key"]
    assert TrainConfig.model_validate(fill_in(recorded, secrets)) == mixed


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": [MATH, "a.jsonl"]}, "lists files beside sources: write each file as a source"),
        ({"train": [MATH, MATH]}, "its sources are named 'math', 'math': give each another"),
        ({"train": [MATH, {"files": "b"}]}, "its sources are named 'math', '': give each another"),
        ({"train": [MATH | {"weight": 0}]}, "weight\n.*greater than 0"),
        ({"train": [MATH | {"wieght": 1}]}, "wieght\n.*not permitted"),
        ({"train": [{"name": "a b", "files": "c"}]}, "name\n.*match pattern"),
        ({"train": "a", "validation": [MATH]}, "source 'math' of data.validation has a weight"),
        (
            {"train": [CODE], "validation": [{"name": "code", "files": "c"}]},
            "source 'code' has another reward in data.train than in data.validation",
        ),
        (
            {"train": "a", "curriculum": {"min_pass_rate": 0.5, "max_pass_rate": 0.5}},
            r"min_pass_rate \(0.5\) is not below max_pass_rate \(0.5\)",
        ),
        (
            {"train": [MATH | {"reward": {"type": "environment"}}]},
            "reward.type is environment, but there is no environment",
        ),
    ],
)
def test_bad_sources_are_named(data, message):
    with pytest.raises(ValidationError, match=message):
        make_config(**data)


def test_a_group_reward_of_one_source_defers_nothing():
    grouped = {**CODE, "reward": {"type": "function", "path": "c.py", "group": True}}
    for sources, defers in (([MATH, CODE], True), ([MATH, grouped], False)):
        config = TrainConfig.model_validate(
            {"model": {"path": "m"}, "data": {"train": sources}, "staleness": 1}
        )
        assert config.defers is defers


def test_a_curriculum_is_off_by_default():
    assert make_config(train="a").data.curriculum is None
    assert make_config(train="a", curriculum={}).data.curriculum == CurriculumConfig()
