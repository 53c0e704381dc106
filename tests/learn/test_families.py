"""Models of many families can be trained, and their export computes what the trainer does."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engines.learn.checkpoint import MODEL_DIR
from engines.learn.learner import Learner
from schemas.config import TrainConfig
from tests.learn.conftest import make_batch
from tests.learn.test_attention import SHAPES, SMALL

CAPPED = {"final_logit_softcapping": 30.0}
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", SHAPES)
def test_two_steps_of_training(
    make_config: Callable[..., TrainConfig],
    model_dir: Path,
    tmp_path: Path,
    kind: str,
    tied: bool,
) -> None:
    more = {"tie_word_embeddings": tied} | (CAPPED if kind == "gemma2" else {})
    torch.manual_seed(0)
    shape = AutoConfig.for_model(kind, **SMALL | SHAPES[kind] | more)
    start = AutoModelForCausalLM.from_config(shape, attn_implementation="eager")
    start.save_pretrained(tmp_path / "model")
    for file in model_dir.glob("*token*"):
        shutil.copy(file, tmp_path / "model")
    config = make_config()
    model = config.model.model_copy(update={"path": tmp_path / "model"})
    learner = Learner(config.model_copy(update={"model": model}))
    learner.restore(None)
    before = learner.logprobs([IDS])[0]
    np.testing.assert_allclose(before, logprobs_of(start.eval()), atol=1e-4)
    for version in range(2):
        metrics = learner.train_step(make_batch(version, policy_version=version))
        assert np.isfinite(list(metrics.values())).all()
    after = learner.logprobs([IDS])[0]
    assert np.abs(after - before).max() > 1e-3
    path = learner.save(2, {}) / MODEL_DIR
    exported = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    np.testing.assert_allclose(after, logprobs_of(exported), atol=1e-4)


def logprobs_of(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([IDS])).logits
    return logits.log_softmax(-1)[0, range(len(IDS) - 1), IDS[1:]].numpy()
