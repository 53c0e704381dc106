import math

import numpy as np
import pytest
import torch

from engines.learn.losses import (
    clipped_policy_losses,
    kl_penalties,
    policy_statistics,
    token_weights,
)

LENGTHS = [3, 1, 5]
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


@pytest.fixture
def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    new, old = torch.randn(2, sum(LENGTHS), generator=generator) * 0.4 - 2.0
    advantages = torch.repeat_interleave(torch.tensor([1.5, -0.7, 0.2]), torch.tensor(LENGTHS))
    return new, old, advantages


def naive_token_loss(new: float, old: float, advantage: float) -> float:
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 0.8), 1.3)
    return -min(ratio * advantage, clipped * advantage)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_loss_equals_a_naive_one_per_sample(tokens: tuple, aggregation: str) -> None:
    new, old, advantages = tokens
    weights = token_weights(LENGTHS, aggregation, total_tokens=9, total_sequences=3)
    loss = (clipped_policy_losses(new, old, advantages, **CLIP) * torch.from_numpy(weights)).sum()
    losses = [naive_token_loss(*map(float, token)) for token in zip(*tokens, strict=True)]
    samples = [losses[:3], losses[3:4], losses[4:]]
    expected = (
        np.mean(losses)
        if aggregation == "token_mean"
        else np.mean([np.mean(sample) for sample in samples])
    )
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_weights_do_not_depend_on_how_samples_are_cut(aggregation: str) -> None:
    totals = {"total_tokens": 9, "total_sequences": 3}
    whole = token_weights(LENGTHS, aggregation, **totals)
    parts = [token_weights([length], aggregation, **totals) for length in LENGTHS]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    assert whole.sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "gradient_flows"),
    [
        (0.5, 1.0, False),
        (0.5, -1.0, True),
        (-0.5, 1.0, True),
        (-0.5, -1.0, False),
        (0.0, 1.0, True),
    ],
)
def test_clip_stops_the_gradient_only_where_it_would_go_further(
    log_ratio: float, advantage: float, gradient_flows: bool
) -> None:
    new = torch.tensor([log_ratio - 1.0], requires_grad=True)
    old, advantages = torch.tensor([-1.0]), torch.tensor([advantage])
    clipped_policy_losses(new, old, advantages, **CLIP).sum().backward()
    assert new.grad is not None
    assert bool(new.grad.abs() > 0) == gradient_flows
    clipped = policy_statistics(new, old, advantages, **CLIP)["actor/pg_clipfrac"].item()
    assert clipped == float(not gradient_flows)


def test_kl_penalty_is_zero_for_equal_policies_and_positive_otherwise(tokens: tuple) -> None:
    new, old, _ = tokens
    assert not kl_penalties(new, new).any()
    assert (kl_penalties(new, old) > 0).all()
    expected = math.exp(old[0] - new[0]) - float(old[0] - new[0]) - 1
    assert kl_penalties(new, old)[0].item() == pytest.approx(expected, rel=1e-4)
