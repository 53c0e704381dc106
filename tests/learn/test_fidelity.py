"""The trainer refuses a model that it computes differently from transformers, known or unknown."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaAttention

from refrain.engines.learn.fidelity import check_fidelity
from refrain.flows.cli import main
from tests.conftest import DEMO
from tests.flows.commands import write_config

REFUSED = "the trainer does not compute a .* model as transformers does.*"
SHARED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "eos_token_id")
TYPICAL: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "qwen3": {"num_hidden_layers": 36, "hidden_size": 4096},
}


class UnseenConfig(LlamaConfig):
    """Configuration of a family that transformers does not have."""

    model_type = "unseen"
    feature: str = "none"
    own_number: int = 100


class IsNoisy(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 0.01 * torch.randn_like(hidden)


class IsNoisyInTraining(IsNoisy):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if self.training else hidden


class LooksAtLength(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * (1 + hidden.shape[1] / 100)


class CarriesAlong(nn.Module):
    """Keeps a running state, as a state space model does."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[None, :, None]


class CountsFromTheRowsStart(nn.Module):
    """Changes its result from position `reach` on, which short test samples do not reach."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * (1 + (torch.arange(hidden.shape[1]) >= self.reach)[:, None])


class HasBuffer(nn.Module):
    """Has a buffer that is in no file and is not computed again after loading."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.linspace(0.5, 2.0, 64), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.steps


class MasksByItself(LlamaAttention):
    """Adds a sliding window to the mask that it receives."""

    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        if (mask := given.get("attention_mask")) is not None:
            places = torch.arange(hidden_states.shape[1])
            far = places[:, None] - places >= self.config.sliding_window
            given["attention_mask"] = mask + far * torch.finfo(torch.float32).min
        return super().forward(hidden_states, *args, **given)


class UnseenForCausalLM(LlamaForCausalLM):
    config_class = UnseenConfig

    def __init__(self, config: UnseenConfig) -> None:
        super().__init__(config)
        parts = {
            "noise": IsNoisy,
            "noise in training": IsNoisyInTraining,
            "length": LooksAtLength,
            "state": CarriesAlong,
            "buffer": HasBuffer,
            "places": lambda: CountsFromTheRowsStart(config.own_number),
        }
        for place, layer in enumerate(self.model.layers):
            if config.feature in parts:
                layer.mlp = nn.Sequential(parts[config.feature](), layer.mlp)
            if config.feature == "mask":
                layer.self_attn = MasksByItself(config, place)

    def forward(self, *args: Any, **given: Any) -> Any:
        output = super().forward(*args, **given)
        if self.config.feature == "logits":
            output.logits = output.logits * 1.5
        return output


@pytest.fixture(autouse=True, scope="module")
def family() -> Iterator[None]:
    AutoConfig.register("unseen", UnseenConfig)
    AutoModelForCausalLM.register(UnseenConfig, UnseenForCausalLM)
    yield
    AutoModelForCausalLM._model_mapping._extra_content.pop(UnseenConfig)
    CONFIG_MAPPING._extra_content.pop("unseen")


@pytest.mark.parametrize(
    ("feature", "difference"),
    [
        ("noise", "differs by .* when it is run twice"),
        ("length", "alone in their rows and transformers' own"),
        ("buffer", "loaded as on GPUs"),
        ("mask", "unseen works on its mask itself"),
        ("places", "packed into one row and alone in theirs differ"),
        ("logits", "alone in their rows and transformers' own"),
    ],
)
def test_an_unseen_feature_is_refused(feature: str, difference: str) -> None:
    config = UnseenConfig(feature=feature, sliding_window=1000, own_number=3000)
    with pytest.raises(ValueError, match=REFUSED + difference):
        check_fidelity(config, 8192)


@pytest.mark.parametrize("feature", ["none", "state", "noise in training"])
def test_an_unseen_model_that_is_computed_right_is_trained(feature: str) -> None:
    assert check_fidelity(UnseenConfig(feature=feature), 2048) is None


@pytest.mark.parametrize("kind", TYPICAL)
def test_a_typical_model_is_checked_in_seconds(kind: str) -> None:
    config = AutoConfig.for_model(kind, **TYPICAL[kind])
    began = time.process_time()
    assert check_fidelity(config, 2048) is None
    assert time.process_time() - began < 5


def test_a_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    file = tmp_path / "model/config.json"
    shutil.copytree(DEMO / "model", file.parent)
    given = json.loads(file.read_text())
    shared = {name: given[name] for name in SHARED}
    config = AutoConfig.for_model("doge", num_experts=4, num_experts_per_tok=2, **shared)
    AutoModelForCausalLM.from_config(config).save_pretrained(file.parent)
    arguments = (str(write_config(tmp_path)), f"model.path={file.parent}", "--check")
    result = CliRunner().invoke(main, ["train", *arguments])
    assert result.exit_code == 2, result.output
    said = " ".join(result.output.split())
    assert "cannot be trained: the trainer does not compute a doge model" in said
    assert not (tmp_path / "runs").exists()
