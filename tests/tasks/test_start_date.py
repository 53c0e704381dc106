"""A resumed run keeps the date of its start, on any day."""

import json
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from refrain.schemas.config import TrainConfig
from refrain.schemas.rollout import Split
from refrain.tasks.run import start_date as module
from refrain.tasks.run.preflight import read_inputs
from refrain.tasks.run.run_dir import CONFIG_FILE, check_run_dir, claim_run_dir, read_config
from refrain.tasks.run.start_date import dated
from tests.conftest import DEMO

MINUTE = "{{ strftime_now('%d %b %Y %H:%M') }} {{ messages[0].content }}"
START = datetime(2026, 11, 25, 23, 59, 58)


class Clock(datetime):
    """A clock that the test sets."""

    at = START

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        del tz
        return cls.at


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Return the demo's model with a chat template that prints the minute."""
    directory = tmp_path / "model"
    shutil.copytree(DEMO / "model", directory, copy_function=lambda a, b: Path(b).symlink_to(a))
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"chat_template": MINUTE}
    file.unlink()
    file.write_text(json.dumps(settings))
    return directory


@pytest.fixture
def config(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    monkeypatch.setattr(module, "datetime", Clock)
    monkeypatch.setattr(Clock, "at", START)
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1 + 1"}],
        "reward_model": {"ground_truth": "2"},
    }
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    return TrainConfig.model_validate(
        {
            "model": {"path": model_dir, "dtype": "float32"},
            "data": {
                "train": tmp_path / "train.jsonl",
                "max_prompt_tokens": 64,
                "max_response_tokens": 64,
            },
            "runs_dir": tmp_path,
            "name": "it",
        }
    )


def given(config: TrainConfig, **data: Any) -> TrainConfig:
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


def begun(config: TrainConfig) -> TrainConfig:
    """Begin a run with this config and return its dated config."""
    config = dated(config, resume=False)
    claim_run_dir(config, resume=False).release()
    return config


def prompt_text(config: TrainConfig) -> str:
    inputs = read_inputs(config)
    (prompt,) = inputs.prompts_of(Split.TRAIN).values()
    return inputs.tokenizer.decode(prompt.token_ids)


def test_resumed_run_keeps_the_date_in_prompts(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begun(config)
    state = read_inputs(first).loader.state(1)
    assert "25" in prompt_text(first)
    assert read_config(config.run_dir).data.date == START
    monkeypatch.setattr(Clock, "at", START + timedelta(days=1))
    for config_of_resume in (config, read_config(config.run_dir)):
        again = dated(config_of_resume, resume=True)
        assert again.data == first.data
        assert check_run_dir(again, resume=True) == []
        read_inputs(again).loader.check_state(state)
    other = dated(config, resume=False)
    with pytest.raises(ValueError, match=r"prompts_hash .*and data\.date, if"):
        read_inputs(other).loader.check_state(state)


def test_a_date_can_be_given_and_not_changed(config: TrainConfig) -> None:
    values = config.model_dump() | {"data": config.data.model_dump() | {"date": "2024-07-26"}}
    mine = begun(TrainConfig.model_validate(values))
    assert mine.data.date == datetime(2024, 7, 26)
    assert dated(config, resume=True).data == mine.data
    changed = given(config, date=datetime(2024, 7, 27))
    with pytest.raises(ValueError, match=r"data\.date: '2024-07-26T00:00:00' -> '2024-07-27"):
        check_run_dir(dated(changed, resume=True), resume=True)


@pytest.mark.parametrize("text", ["2026-11-26T09:30:00+09:00", "2026-11-26 09:30"])
def test_a_date_is_what_the_clock_on_the_wall_shows(config: TrainConfig, text: str) -> None:
    values = config.model_dump() | {"data": config.data.model_dump() | {"date": text}}
    assert TrainConfig.model_validate(values).data.date == datetime(2026, 11, 26, 9, 30)


def test_a_run_of_an_earlier_version_takes_the_date_that_is_given(config: TrainConfig) -> None:
    begun(config)
    file = config.run_dir / CONFIG_FILE
    recorded = json.loads(file.read_text())
    del recorded["data"]["date"]
    file.write_text(json.dumps(recorded))
    then = datetime(2025, 1, 1)
    again = dated(given(config, date=then), resume=True)
    assert again.data.date == then
    claim_run_dir(again, resume=True).release()
    assert dated(config, resume=True).data.date == then


def test_scorers_are_told(config: TrainConfig) -> None:
    assert config.data.surroundings is None
    told = dated(config, resume=False).data.surroundings
    assert told == {"LANG": "C.UTF-8", "TZ": "UTC", "REFRAIN_DATE": "2026-11-25T23:59:58"}
