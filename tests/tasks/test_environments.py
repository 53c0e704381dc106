"""What a run refuses or warns of before it starts, if it has an environment."""

from pathlib import Path
from typing import Any

import pytest

from engines.data.messages import PromptSettings
from schemas.config import TrainConfig
from schemas.rollout import RequestId, Split
from tasks.run.environments import read_environment, task_of
from tasks.run.model_inputs import read_tokenizer
from tasks.run.preflight import read_inputs
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
