"""The trainer reports how much of the adapters' update survives rounding to the engines' dtype."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from refrain.engines.learn.rounding_loss import LOW, SAMPLE, KeptUpdate
from refrain.engines.learn.trainer import TrainerActor
from refrain.schemas.config import TrainConfig
from refrain.schemas.inputs import ModelConfig
from refrain.schemas.weights import PolicyWeights, WeightsFile
from tests.learn.conftest import make_batch, own_logprobs

MakeConfig = Callable[..., TrainConfig]
IDS = [(7 * index * index + 3) % 64 for index in range(60)]
LAST_BIT = 2.0**-7
"""Distance from 1 to the next larger bfloat16."""


def share(update: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> float | None:
    kept_update = KeptUpdate(dtype)
    kept_update.add(torch.ones_like(update), 1.0 + update)
    return kept_update.share


def test_the_share_is_what_rounding_leaves() -> None:
    small, large = torch.full((8, 8), LAST_BIT / 4), torch.full((8, 8), LAST_BIT * 4)
    assert share(small) == 0.0
    assert share(large) == 1.0
    assert share(small, torch.float32) == 1.0
    assert share(torch.cat([small, large])) == pytest.approx(256 / 257)
    assert share(torch.zeros(8, 8)) is None


def test_a_large_weight_is_looked_at_in_all_columns() -> None:
    update = torch.zeros(2 * SAMPLE // 64, 64)
    update[:, ::2] = LAST_BIT * 4
    update[:, 1::2] = LAST_BIT / 4
    assert share(update) == pytest.approx(256 / 257, rel=1e-3)


@pytest.fixture
def make_actor(
    make_config: MakeConfig, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., TrainerActor]]:
    """Return a function that makes a trainer for engines in bfloat16. The start weights are exact
    in bfloat16."""
    start = Path(shutil.copytree(model_dir, tmp_path / "start"))
    weights = safetensors.torch.load_file(start / "model.safetensors")
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    safetensors.torch.save_file(rounded, start / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(
        TrainerActor,
        "_announced",
        lambda self, version: WeightsFile(self._files.path(version), 0, 2),
    )
    actors = []

    def make(**trainer: Any) -> TrainerActor:
        config = make_config(**trainer)
        model = ModelConfig(path=start, dtype="bfloat16")
        actors.append(TrainerActor(config.model_copy(update={"model": model}), 0))
        actors[-1].restore(None)
        return actors[-1]

    yield make
    for actor in actors:
        actor._files.delete()


def by_an_engine(actor: TrainerActor, weights: PolicyWeights) -> np.ndarray:
    """Return log-probabilities with the published weights, without further rounding."""
    model = AutoModelForCausalLM.from_pretrained(
        actor._learner._config.model.path, dtype=torch.float32
    )
    model.load_state_dict(safetensors.torch.load_file(weights.source.path), strict=False)
    return own_logprobs(model, IDS)


@pytest.mark.parametrize(("learning_rate", "least", "most"), [(3e-5, 0.01, 0.3), (1e-3, 0.8, 1.1)])
def test_an_update_that_rounding_swallows_is_warned_of_once_with_its_share(
    make_actor: Callable[..., TrainerActor], learning_rate: float, least: float, most: float
) -> None:
    actor = make_actor(lora={"rank": 4}, learning_rate=learning_rate)
    start = actor.publish(0, [IDS])
    assert (start.arrived, start.warnings) == (None, ())
    actor.train_step(make_batch())
    weights = actor.publish(1, [IDS])
    assert least < weights.arrived < most
    before = by_an_engine(actor, start)
    wanted = actor._learner.logprobs([IDS])[0] - before
    got = by_an_engine(actor, weights) - before
    assert (got * wanted).sum() / (wanted**2).sum() == pytest.approx(weights.arrived, abs=0.3)
    said = [
        sentence for sentence in weights.warnings if f"get {weights.arrived:.0%} of" in sentence
    ]
    assert len(said) == len(weights.warnings) == (weights.arrived < LOW)
    assert all("raise trainer.learning_rate" in sentence for sentence in said)
    actor.train_step(make_batch(1, policy_version=1))
    again = actor.publish(2, [IDS])
    assert again.arrived > weights.arrived
    assert again.warnings == ()


def test_whole_weights_have_no_share(make_actor: Callable[..., TrainerActor]) -> None:
    actor = make_actor()
    actor.train_step(make_batch())
    weights = actor.publish(1, [IDS])
    assert (weights.arrived, weights.warnings) == (None, ())
