"""LoRA: the trainer updates only the adapters, sends merged weights, and peft loads the adapter."""

from collections.abc import Callable

import numpy as np
import peft
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from refrain.engines.learn.checkpoint import ADAPTER_DIR, MODEL_DIR
from refrain.engines.learn.learner import Learner
from refrain.schemas.config import TrainConfig
from tests.learn.conftest import make_batch, own_logprobs, started

MakeConfig = Callable[..., TrainConfig]
LORA = {"rank": 4, "alpha": 8.0}
IDS = [3, 1, 4, 1, 5, 9]


def trained(config: TrainConfig, steps: int = 2) -> Learner:
    learner = started(config)
    for version in range(steps):
        learner.train_step(make_batch(version, policy_version=version))
    return learner


def test_adapters_move_the_policy_and_engines_get_them_merged(make_config: MakeConfig) -> None:
    config = make_config(lora=LORA, learning_rate=1e-2)
    learner = trained(config)
    start = safetensors.torch.load_file(config.model.path / "model.safetensors")
    sent = safetensors.torch.load(learner.weights_buffer())
    assert sent.keys() == start.keys()
    moved = {name for name in sent if not torch.equal(sent[name], start[name])}
    assert len(moved) == 2 * 7  # Seven linear layers in each of two decoder layers.
    assert all("proj" in name for name in moved)
    engine = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    before = own_logprobs(engine, IDS)
    engine.load_state_dict(sent, strict=False)
    np.testing.assert_allclose(learner.logprobs([IDS])[0], own_logprobs(engine, IDS), atol=1e-5)
    assert np.abs(before - own_logprobs(engine, IDS)).max() > 0.01
    base = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, learner.save(2, {}) / ADAPTER_DIR)
    np.testing.assert_allclose(learner.logprobs([IDS])[0], own_logprobs(adapted, IDS), atol=1e-5)


def test_run_resumes_from_checkpoints_of_adapters(
    make_config: MakeConfig,
) -> None:
    config = make_config({"kl_coefficient": 0.1}, lora=LORA, learning_rate=1e-2)
    straight = trained(config)
    path = straight.save(2, {})
    resumed = started(config, path)
    batch = make_batch(2, policy_version=2)
    assert resumed.train_step(batch) == straight.train_step(batch)
    assert resumed.weights_buffer() == straight.weights_buffer()
    saved = sum(file.stat().st_size for file in (path / "training").iterdir())
    assert saved < (path / MODEL_DIR / "model.safetensors").stat().st_size


def test_the_reference_is_the_policy_without_its_adapters(make_config: MakeConfig) -> None:
    """The reference needs no second model, and gives the log-probabilities of the start model."""
    learner = trained(make_config({"kl_coefficient": 0.1}, lora=LORA, learning_rate=1e-2))
    fresh = started(make_config())
    assert learner._reference is not None
    assert learner._reference.policy is learner._policy
    with learner._reference.at_work():
        np.testing.assert_array_equal(learner.logprobs([IDS])[0], fresh.logprobs([IDS])[0])
    assert np.abs(learner.logprobs([IDS])[0] - fresh.logprobs([IDS])[0]).max() > 0.01
