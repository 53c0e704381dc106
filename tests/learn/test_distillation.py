"""On-policy distillation: the gradient of the reverse KL divergence, from the tokens drawn."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from refrain.engines.learn.objective import LossTokens, policy_loss
from refrain.engines.learn.objectives.distillation import taught_advantages
from refrain.schemas.algorithm import AlgorithmConfig
from refrain.schemas.config import TrainConfig
from tests.learn.conftest import as_batch, make_batch, on_policy, own_logprobs, save_model, started

MakeConfig = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher"), seed=7)


def test_gradient_is_that_of_the_reverse_kl() -> None:
    """Over all tokens of a vocabulary, each weighted by its probability."""
    torch.manual_seed(0)
    logits = torch.randn(9, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(9, dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    drawn, counted = logprobs.detach(), torch.ones(9, dtype=torch.bool)
    taught, kl_sum = taught_advantages(torch.ones(9).double(), drawn, teacher, counted, 0.0)
    tokens = LossTokens(
        num_tokens=[1] * 9,
        inference_logprobs=drawn,
        old_logprobs=None,
        advantages=taught,
        weights=drawn.exp(),
        counted=counted,
        staleness=torch.zeros(9, dtype=torch.int32),
        max_staleness=0,
    )
    loss, _ = policy_loss(logprobs, tokens, AlgorithmConfig())
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    divergence = (logprobs.exp() * (logprobs - teacher)).sum()
    (expected,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(gradient, expected)
    assert float(kl_sum) == pytest.approx(float((drawn - teacher).sum()))


def test_tokens_that_do_not_count_teach_nothing() -> None:
    given = torch.tensor([2.0, 3.0]), torch.tensor([-1.0, -torch.inf]), torch.tensor([-0.5, -1.0])
    taught, kl_sum = taught_advantages(*given, torch.tensor([True, False]), 0.5)
    assert taught.tolist() == [1.5, 3.0]
    assert float(kl_sum) == -0.5


def test_a_teacher_scores_the_policys_tokens(make_config: MakeConfig, teacher_dir: Path) -> None:
    learner = started(make_config({"teacher": teacher_dir}))
    batch = on_policy(make_batch(), learner, temperature=0.7)
    metrics = learner.train_step(batch)
    model = AutoModelForCausalLM.from_pretrained(teacher_dir)
    differences = [
        np.array(row["inference_logprobs"]) - own_logprobs(model, ids, 0.7)[len(prompt) - 1 :]
        for row in batch.to_pylist()
        for prompt in [row["prompt_token_ids"]]
        for ids in [prompt + row["response_token_ids"]]
    ]
    expected = np.concatenate(differences).mean()
    assert metrics["actor/teacher_kl"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_rewards_teach_by_their_weight(
    make_config: MakeConfig, teacher_dir: Path, weight: float
) -> None:
    first, second = (
        started(make_config({"teacher": teacher_dir, "reward_weight": weight})) for _ in range(2)
    )
    rows = on_policy(make_batch(), first, temperature=0.7).to_pylist()
    first.train_step(as_batch(rows))
    second.train_step(as_batch([row | {"reward": -row["reward"]} for row in rows]))
    assert (first.weights_buffer() == second.weights_buffer()) == (weight == 0.0)


def test_a_policy_has_nothing_to_learn_from_itself(
    make_config: MakeConfig, model_dir: Path, teacher_dir: Path
) -> None:
    norms = []
    for teacher in (model_dir, teacher_dir):
        learner = started(make_config({"teacher": teacher}))
        batch = on_policy(make_batch(), learner, temperature=0.7)
        norms.append(learner.train_step(batch)["actor/grad_norm"])
    assert norms[0] < 1e-3 * norms[1]
