"""No record of a run shows the keys of its config, and a resumed run still has them."""

import json
import stat
from pathlib import Path

import pytest

from refrain.engines.learn.mirror import Mirror
from refrain.engines.tracking.mlflow_run import flat_params
from refrain.flows.config_file import load_config, override
from refrain.schemas.config import TrainConfig
from refrain.schemas.reward import FunctionReward
from refrain.tasks.run.config_record import CONFIG_FILE, SECRETS_FILE
from refrain.tasks.run.run_dir import check_run_dir, claim_run_dir, read_config

KEY, URL = "sk-wJalrXUtnFEMI", "s3://AKIA:wJalr/XUtnFEMI@bucket/folder"
ARGUMENTS = {"api_key": KEY, "bonus": 0.5, "strict": True, "retries": 3}


def config(runs_dir: Path, key: str = KEY) -> TrainConfig:
    return TrainConfig.model_validate(values(runs_dir, key))


def values(runs_dir: Path, key: str = KEY) -> dict:
    return {
        "name": "r",
        "runs_dir": str(runs_dir),
        "model": {"path": "m"},
        "data": {"train": ["d"]},
        "reward": {"type": "function", "path": "f.py", "kwargs": ARGUMENTS | {"api_key": key}},
        "trainer": {"checkpoint_url": URL},
    }


def arguments(config: TrainConfig) -> dict:
    assert isinstance(config.reward, FunctionReward)
    return config.reward.arguments


def assert_hidden(text: str) -> None:
    assert "XUtnFEMI" not in text
    assert "***" in text


def test_no_record_shows_them(tmp_path: Path) -> None:
    """Check MLflow's parameters, the files of the run, Prefect's parameters and messages."""
    from pydantic_core import to_json

    from refrain.flows.train import train

    given = config(tmp_path)
    assert_hidden(given.model_dump_json())
    assert_hidden(str(flat_params(given)))
    assert_hidden(repr(given))
    assert_hidden(to_json(train.serialize_parameters({"config": given, "resume": False})).decode())
    reaches = train.validate_parameters({"config": given, "resume": False})["config"]
    assert arguments(reaches) == ARGUMENTS
    assert "bucket/folder" in str(given.trainer.checkpoint_url), "hides the address too"
    claim_run_dir(given, resume=False).release()
    for file in given.run_dir.iterdir():
        if file.name != SECRETS_FILE:
            assert "XUtnFEMI" not in file.read_text()


def test_resumed_run_reads_secrets_from_a_private_file(tmp_path: Path) -> None:
    given = config(tmp_path)
    claim_run_dir(given, resume=False).release()
    file = given.run_dir / SECRETS_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = read_config(given.run_dir)
    assert arguments(again) == ARGUMENTS
    assert again == given
    claim_run_dir(again, resume=True).release()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    copied = load_config(given.run_dir / CONFIG_FILE, ["seed=3"])
    assert arguments(copied) == ARGUMENTS
    changed = override(again, ["rollout.num_engines=2", "reward.kwargs.bonus=1.5"])
    assert arguments(changed) == ARGUMENTS | {"bonus": 1.5}


def test_without_that_file_the_config_must_have_them(tmp_path: Path) -> None:
    given = config(tmp_path)
    claim_run_dir(given, resume=False).release()
    (given.run_dir / SECRETS_FILE).unlink()
    shown = read_config(given.run_dir)
    with pytest.raises(ValueError, match=r"reward\.kwargs\.api_key, trainer\.checkpoint_url: .*"):
        check_run_dir(shown, resume=True)
    claim_run_dir(given, resume=True).release()
    assert arguments(read_config(given.run_dir)) == ARGUMENTS


def test_another_secret_is_another_config_and_is_not_shown(tmp_path: Path) -> None:
    claim_run_dir(config(tmp_path), resume=False).release()
    with pytest.raises(ValueError, match=r"reward\.kwargs") as refused:
        check_run_dir(config(tmp_path, key="sk-other-XUtnFEMI"), resume=True)
    assert_hidden(str(refused.value))


def test_a_run_without_secrets_has_no_such_file(tmp_path: Path) -> None:
    plain = values(tmp_path) | {"reward": {"type": "builtin"}, "trainer": {}}
    given = TrainConfig.model_validate(plain)
    claim_run_dir(given, resume=False).release()
    assert not (given.run_dir / SECRETS_FILE).exists()
    assert json.loads((given.run_dir / CONFIG_FILE).read_text())["name"] == "r"


def test_an_address_that_cannot_be_used_is_refused_without_its_key() -> None:
    with pytest.raises(ValueError, match=r"ftp://\*+@host/x cannot be used") as refused:
        Mirror("ftp://me:XUtnFEMI@host/x", "r")
    assert_hidden(str(refused.value))
