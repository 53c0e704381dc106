"""Python code in a model's directory runs only with `model.trust_remote_code=true`."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import dynamic_module_utils

from refrain.engines.data.dataset import load_tokenizer
from refrain.flows.cli import main
from refrain.schemas.inputs import ModelConfig
from refrain.tasks.run.model_inputs import check_against_transformers, check_model
from tests.flows.commands import altered_model, write_config

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Path({marker!r}).touch()


class OwnConfig(Qwen3Config):
    model_type = "own"


class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
SENTENCE = r"comes with Python code of its own, .* set model.trust_remote_code=true"


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return the file that the model's code creates."""
    return tmp_path / "executed"


@pytest.fixture
def model(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model that transformers does not know, with code for it and its tokenizer."""
    modules = tmp_path / "modules"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = altered_model(tmp_path / "model")
    (path / "own.py").write_text(CODE.format(marker=str(marker)))
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit(path / "config.json", model_type="own", auto_map=classes, architectures=["OwnForCausalLM"])
    edit(
        path / "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]},
        tokenizer_class="OwnTokenizer",
    )
    return path


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_code_that_is_not_trusted_does_not_run(model: Path, marker: Path) -> None:
    with pytest.raises(ValueError, match=SENTENCE):
        check_model(ModelConfig(path=model))
    with pytest.raises(ValueError, match=SENTENCE):
        check_against_transformers(ModelConfig(path=model))
    with pytest.raises(ValueError, match=SENTENCE):
        load_tokenizer(model)
    assert not marker.exists()


def test_code_that_is_trusted_runs(model: Path, marker: Path) -> None:
    trusted = ModelConfig(path=model, trust_remote_code=True)
    check_model(trusted)
    assert marker.exists()
    assert check_against_transformers(trusted) == ()
    assert type(load_tokenizer(model, trust_remote_code=True)).__name__ == "OwnTokenizer"


def test_a_known_model_does_not_need_its_code(model: Path, marker: Path) -> None:
    """Many models on the Hub still carry code from before transformers supported them."""
    edit(model / "config.json", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    assert check_model(ModelConfig(path=model)) == ()
    assert not marker.exists()


@pytest.mark.parametrize("command", ["train", "evaluate", "profile"])
def test_every_command_refuses_it(
    command: str, model: Path, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = str(write_config(tmp_path))
    args = {
        "train": [config, f"model.path={model}", "--check"],
        "evaluate": [str(model), str(tmp_path / "validation.parquet")],
        "profile": ["--model", str(model)],
    }[command]
    # Answer yes to any prompt.
    result = CliRunner().invoke(main, [command, *args], input="y\n" * 9)
    assert result.exit_code == 2, result.output
    assert "model.trust_remote_code=true" in result.output
    assert not marker.exists()


def test_a_draft_model_is_refused_with_the_policys_setting(
    model: Path, marker: Path, tmp_path: Path
) -> None:
    config = str(write_config(tmp_path))
    drafters = f"specactor.draft_models=[{{name: own, path: {model}}}]"
    result = CliRunner().invoke(main, ["train", config, drafters, "--check"], input="y\n" * 9)
    assert result.exit_code == 2, result.output
    assert "specactor.draft_models: " in result.output
    assert not marker.exists()
