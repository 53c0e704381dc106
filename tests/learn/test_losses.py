import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.learn.losses import (
    clipped_policy_losses,
    kl_penalties,
    policy_statistics,
    sequence_log_ratios,
    token_weights,
    truncated_weights,
)

LENGTHS = [3, 1, 5]
ALL = [np.ones(length, bool) for length in LENGTHS]
TOTALS = {"total_tokens": 9, "total_sequences": 3, "max_response_tokens": 20}
AGGREGATIONS = ["token_mean", "sequence_mean", "fixed_length"]
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


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_equals_a_naive_one_per_sample(tokens: tuple, aggregation: str) -> None:
    new, old, advantages = tokens
    weights = torch.from_numpy(np.concatenate(token_weights(ALL, aggregation, **TOTALS)))
    loss = (clipped_policy_losses(new - old, advantages, **CLIP) * weights).sum()
    losses = [naive_token_loss(*map(float, token)) for token in zip(*tokens, strict=True)]
    samples = [losses[:3], losses[3:4], losses[4:]]
    expected = {
        "token_mean": np.mean(losses),
        "sequence_mean": np.mean([np.mean(sample) for sample in samples]),
        "fixed_length": np.mean([np.sum(sample) / 20 for sample in samples]),
    }
    assert loss.item() == pytest.approx(expected[aggregation], abs=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_do_not_depend_on_how_samples_are_cut(aggregation: str) -> None:
    whole = token_weights(ALL, aggregation, **TOTALS)
    parts = [token_weights([counted], aggregation, **TOTALS)[0] for counted in ALL]
    np.testing.assert_array_equal(np.concatenate(whole), np.concatenate(parts))
    total = 9 / (3 * 20) if aggregation == "fixed_length" else 1.0
    assert np.concatenate(whole).sum() == pytest.approx(total)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6))
def test_a_token_that_does_not_count_might_as_well_not_be_there(
    aggregation: str, masks: list[list[bool]]
) -> None:
    """Weights of the counted tokens are those of a batch that has no others."""
    counted = [np.array(mask) for mask in masks]
    rest = [np.ones(sum(mask), bool) for mask in masks if any(mask)]
    totals = {
        "total_tokens": sum(map(sum, masks)),
        "total_sequences": len(rest),
        "max_response_tokens": 20,
    }
    weights = np.concatenate(token_weights(counted, aggregation, **totals))
    flat = np.concatenate(counted)
    assert np.isfinite(weights).all()
    assert not weights[~flat].any()
    expected = token_weights(rest, aggregation, **totals)
    assert weights[flat].tolist() == [value for part in expected for value in part]


def test_sequence_ratio_is_the_geometric_mean_of_its_counted_tokens() -> None:
    ratios = torch.tensor([2.0, 4.0, 8.0, 3.0, 1.0, 1.0])
    counted = torch.tensor([True, True, True, True, False, False])
    log_ratios = torch.where(counted, ratios.log(), 0.0)
    means = torch.exp(sequence_log_ratios(log_ratios, counted, [3, 2, 1]))
    torch.testing.assert_close(means, torch.tensor([4.0, 4.0, 4.0, 3.0, 3.0, 1.0]))


def naive_gspo_loss(new: np.ndarray, old: np.ndarray, advantage: float) -> float:
    ratio = np.exp(np.mean(new - old))
    return -min(ratio * advantage, np.clip(ratio, 0.8, 1.3) * advantage)


def test_gspo_loss_equals_a_naive_one_per_sequence(tokens: tuple) -> None:
    new, old, advantages = tokens
    ratios = sequence_log_ratios(new - old, torch.ones(9, dtype=torch.bool), LENGTHS)
    weights = torch.from_numpy(np.concatenate(token_weights(ALL, "sequence_mean", **TOTALS)))
    loss = (clipped_policy_losses(ratios, advantages, **CLIP) * weights).sum()
    cuts = [np.split(values.numpy(), [3, 4]) for values in tokens]
    losses = [naive_gspo_loss(new, old, own[0]) for new, old, own in zip(*cuts, strict=True)]
    assert loss.item() == pytest.approx(np.mean(losses), abs=1e-6)


def test_gspo_clips_whole_sequences() -> None:
    """One token far off takes the gradient from all of its sequence, and from no other."""
    new = torch.tensor([3.0, 0.0, 0.0, 0.1], requires_grad=True)
    ratios = sequence_log_ratios(new, torch.ones(4, dtype=torch.bool), [3, 1])
    clipped_policy_losses(ratios, torch.ones(4), **CLIP).sum().backward()
    assert new.grad is not None
    assert (new.grad != 0).tolist() == [False, False, False, True]


@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=1), st.floats(0.5, 9.0))
def test_truncated_weights_are_ratios_up_to_the_cap(
    pairs: list[tuple[float, float]], cap: float
) -> None:
    old, inference = torch.tensor(pairs, dtype=torch.float64).T
    weights, truncated = truncated_weights(old.requires_grad_(), inference, cap)
    ratios = [math.exp(a - b) for a, b in pairs]
    assert weights.tolist() == pytest.approx([min(ratio, cap) for ratio in ratios])
    assert truncated.tolist() == [ratio > cap for ratio in ratios]
    assert not weights.requires_grad


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
    clipped_policy_losses(new - old, advantages, **CLIP).sum().backward()
    assert new.grad is not None
    assert bool(new.grad.abs() > 0) == gradient_flows
    for counts in (True, False):
        counted = torch.tensor([counts])
        statistics = policy_statistics(new.detach() - old, advantages, counted, **CLIP)
        assert statistics["actor/pg_clipfrac"] == float(counts and not gradient_flows)
        assert bool(statistics["actor/ratio_mean"] > 0) == counts


def test_kl_penalty_is_zero_for_equal_policies_and_positive_otherwise(tokens: tuple) -> None:
    new, old, _ = tokens
    assert not kl_penalties(new, new).any()
    assert (kl_penalties(new, old) > 0).all()
    expected = math.exp(old[0] - new[0]) - float(old[0] - new[0]) - 1
    assert kl_penalties(new, old)[0].item() == pytest.approx(expected, rel=1e-4)
