"""What a run refuses or warns of before it starts, if it has an environment."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refrain.engines.data.messages import PromptSettings
from refrain.flows.prepare import _environment as shown_environment
from refrain.schemas.config import TrainConfig
from refrain.schemas.rollout import RequestId, Split
from refrain.tasks.reward import which_to_score
from refrain.tasks.run.environments import read_environment, task_of
from refrain.tasks.run.model_inputs import read_tokenizer
from refrain.tasks.run.preflight import read_inputs
from tests.conftest import DEMO, REPOSITORY

TOOLS = '''
def add(a: int, b: int) -> int:
    """Sum of two numbers."""
    return a + b

tools = [add]
'''
CLASS = "class Echo:\n    def step(self, turn): return 1.0\n"


def config_of(path: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"path": str(DEMO / "model"), "dtype": "float32"},
            "data": {
                "train": [str(DEMO / "data" / "train.parquet")],
                "max_prompt_tokens": 128,
                "max_response_tokens": 256,
            },
            "environment": {"path": str(path)},
            "reward": {"type": "environment"},
        }
        | changes
    )


def written(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(source)
    return path


def read(config: TrainConfig) -> Any:
    return read_environment(config, read_tokenizer(config.model), PromptSettings())


def test_a_class_needs_no_tools(tmp_path: Path) -> None:
    setup, settings, warnings = read(config_of(written(tmp_path, CLASS)))
    assert (setup.has_class, list(setup.tools), warnings) == (True, [], ())
    assert settings == PromptSettings()


def test_tools_reach_the_chat_template_and_it_may_ignore_them(tmp_path: Path) -> None:
    _, settings, (warning,) = read(config_of(written(tmp_path, CLASS + TOOLS_OF_CLASS)))
    (tool,) = settings.template_arguments["tools"]
    assert tool["function"]["name"] == "add"
    assert "does not show tools" in warning


TOOLS_OF_CLASS = TOOLS.replace("tools = [add]", "Echo.tools = [add]")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (TOOLS, "chat template .*user"),
        ("raise OSError('no file')", "no file"),
        ("x = 1", "tools"),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(
    tmp_path: Path, source: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        read_inputs(config_of(written(tmp_path, source)))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine\.py"):
        read_inputs(config_of(tmp_path / "mine.py"))


def test_an_environments_score_needs_an_environment() -> None:
    with pytest.raises(ValueError, match=r"set environment\.path"):
        config_of(Path("x"), environment=None)


def test_a_plan_shows_the_environment(tmp_path: Path) -> None:
    path = written(tmp_path, CLASS + TOOLS_OF_CLASS)
    environment = {"path": str(path), "name": "Echo", "max_turns": 3, "on_error": "leave_out"}
    config = config_of(path, environment=environment)
    plan: Any = SimpleNamespace(config=config, inputs=read_inputs(config))
    assert shown_environment(plan)["environment"] == (
        f"{path} (Echo), tools: add, at most 3 turns, 8 calls a turn, 1024 tokens an observation, "
        "30 s a call; on_error: leave_out"
    )
    alone = config_of(path, environment=None, reward={"type": "builtin"})
    assert shown_environment(SimpleNamespace(config=alone, inputs=plan.inputs)) == {}


REWARD = {"type": "function", "path": "x.py", "group": True}


@pytest.mark.parametrize(
    ("changes", "split", "left_out", "num_finished"),
    [
        ({"environment": None, "reward": {"type": "builtin"}}, "train", False, 1),
        ({"on_error": "zero"}, "train", False, 1),
        ({"on_error": "leave_out"}, "train", True, 1),
        ({"on_error": "leave_out", "reward": REWARD}, "train", True, 16),
        ({"on_error": "leave_out", "reward": REWARD}, "validation", False, 3),
    ],
)
def test_which_rollouts_a_step_scores(
    changes: dict[str, Any], split: str, left_out: bool, num_finished: int
) -> None:
    given = {"rollout": {"group_size": 16}, "validation_samples": 3} | changes
    if on_error := given.pop("on_error", None):
        given["environment"] = {"path": "x.py", "on_error": on_error}
    config = config_of(Path("x.py"), **given)
    found = which_to_score(config, Split(split))
    assert found == {"leave_out": left_out, "num_finished": num_finished}


def test_a_step_whose_groups_are_scored_as_a_whole_defers_nothing() -> None:
    values = {"staleness": 1, "environment": None}
    assert config_of(Path("x"), reward={"type": "builtin"}, **values).defers
    assert not config_of(Path("x"), reward=REWARD, **values).defers


def test_samples_of_a_prompt_share_the_seed_of_a_step(tmp_path: Path) -> None:
    config = config_of(REPOSITORY / "examples" / "second_try.py")
    inputs = read_inputs(config)
    prompt, other = inputs.datasets[Split.TRAIN].prompts[:2]

    def seed(step: int, sample: int, of: Any = prompt) -> int:
        task = task_of(config, RequestId(Split.TRAIN, step, of.key, sample), of)
        assert task is not None
        assert task.messages == of.messages != []
        return task.seed

    assert seed(1, 0) == seed(1, 3)
    assert len({seed(1, 0), seed(2, 0), seed(1, 0, other)}) == 3
    assert (
        task_of(
            config_of(tmp_path / "x", environment=None, reward={"type": "builtin"}),
            RequestId(Split.TRAIN, 1, prompt.key, 0),
            prompt,
        )
        is None
    )
