"""`algorithm.file`: a user's advantage and loss functions replace the built-in ones."""

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from refrain.engines.learn.own_functions import own_functions
from refrain.schemas.config import TrainConfig
from tests.learn.conftest import make_batch, started

AS_BUILT_IN = """
import torch

def compute_advantage(reward, group_rewards):
    return (reward - group_rewards.mean()) / (group_rewards.std(ddof=1) + 1e-6)

def compute_loss(log_ratios, advantages, algorithm):
    ratio = torch.exp(log_ratios)
    near = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return torch.maximum(-ratio * advantages, -near * advantages)
"""
REINFORCE = """
def compute_loss(log_ratios, advantages, algorithm):
    return -log_ratios * advantages
"""
DOUBLED = """
def compute_advantage(reward, group_rewards):
    return 2.0 * (reward - group_rewards.mean())
"""


@pytest.fixture
def trained(
    make_config: Callable[..., TrainConfig], tmp_path: Path
) -> Callable[..., tuple[dict, dict]]:
    """Return a function that trains one step with such a file and returns metrics and weights."""

    def train(text: str | None, **algorithm: object) -> tuple[dict, dict]:
        file = tmp_path / f"mine{len(list(tmp_path.iterdir()))}.py"
        file.write_text(text or "")
        own = {"file": file} if text else {}
        learner = started(make_config(algorithm | own))
        metrics = learner.train_step(make_batch())
        return metrics, safetensors.torch.load(learner.weights_buffer())

    return train


def test_the_built_in_ones_written_by_a_user_do_the_same(trained: Callable) -> None:
    (metrics, weights), (expected, others) = trained(AS_BUILT_IN), trained(None)
    assert metrics == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(weights, others, atol=1e-6, rtol=0.0)


def test_others_do_something_else(trained: Callable) -> None:
    expected, weights = trained(None, scale_rewards="none")
    metrics, others = trained(REINFORCE)
    assert metrics["actor/pg_loss"] != pytest.approx(expected["actor/pg_loss"], rel=1e-2)
    assert any(not torch.equal(weights[name], others[name]) for name in weights)
    doubled, _ = trained(DOUBLED)
    name = "critic/advantages/max"
    assert doubled[name] == pytest.approx(2.0 * expected[name])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "defines neither compute_advantage nor compute_loss"),
        ("import nowhere", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("compute_loss = 3", "compute_loss in .* is not a function"),
        ("def compute_loss(a): ...", r"cannot be called with log_ratios, advantages, algorithm"),
        ("def compute_advantage(a, b, c): ...", "cannot be called with reward, group_rewards"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"algorithm.file: .*{message}"):
        own_functions(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no Python file .*nowhere\.py"):
        own_functions(tmp_path / "nowhere.py")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def compute_loss(a, b, c): return a.sum()", r"returned the shape \(\), not one loss"),
        ("def compute_loss(a, b, c): return None", "returned NoneType, not one loss"),
        ("def compute_advantage(a, b): return float('nan')", "is nan: return a finite number"),
    ],
)
def test_invalid_results_of_own_functions_are_refused(
    trained: Callable, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trained(text)
