"""Losses, ratios, importance weights and KL estimates, against formulas written by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.learn.diagnostics import clip_figures
from engines.learn.losses import (
    MAX_KL,
    bounded_ratios,
    clipped_policy_losses,
    importance_weights,
    kl_penalties,
    sequence_log_ratios,
    token_weights,
)
from schemas.algorithm import AlgorithmConfig

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
    """Counted tokens have the same weights as in a batch without the other tokens."""
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


def test_a_sequence_ratio_has_the_gradient_of_equation_5() -> None:
    """GSPO's equation 5 is `s_i A_i grad(log s_i)`. Compare with autograd through the mean."""
    new = torch.tensor([0.1, -0.2, 0.3, 0.05, 0.1], requires_grad=True)
    counted, advantages = torch.ones(5, dtype=torch.bool), torch.tensor([1.5] * 3 + [-0.5] * 2)
    weights = torch.tensor([1 / 6] * 3 + [1 / 4] * 2)
    ratios = sequence_log_ratios(new, counted, [3, 2])
    loss = (clipped_policy_losses(ratios, advantages, clip_low=0.5, clip_high=0.5) * weights).sum()
    (found,) = torch.autograd.grad(loss, new)
    direct = -(1.5 * new[:3].mean().exp() - 0.5 * new[3:].mean().exp()) / 2.0
    (expected,) = torch.autograd.grad(direct, new)
    torch.testing.assert_close(found, expected)


def test_weights_of_tokens_weigh_the_gradients_of_tokens() -> None:
    """This holds for a sequence ratio too, as in veRL."""
    new = torch.zeros(2, requires_grad=True)
    ratios = sequence_log_ratios(new, torch.ones(2, dtype=torch.bool), [2])
    losses = clipped_policy_losses(ratios, torch.ones(2), **CLIP) * torch.tensor([1.0, 3.0])
    losses.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [-1.0, -3.0]


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
    """One token far off the old policy clips its whole sequence, and no other sequence."""
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
    log_ratios = old.requires_grad_() - inference
    counted = torch.ones(len(pairs), dtype=torch.bool)
    weights, truncated = importance_weights(log_ratios, counted, [len(pairs)], cap=cap)
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
        settings = AlgorithmConfig.model_validate(CLIP)
        statistics = clip_figures(new.detach() - old, advantages, counted, settings)
        assert statistics["actor/pg_clipfrac"] == float(counts and not gradient_flows)
        assert bool(statistics["actor/ratio_mean"] > 0) == counts


def test_kl_penalty_is_zero_for_equal_policies_and_positive_otherwise(tokens: tuple) -> None:
    new, old, _ = tokens
    assert not kl_penalties(new, new).any()
    assert (kl_penalties(new, old) > 0).all()
    expected = math.exp(old[0] - new[0]) - float(old[0] - new[0]) - 1
    assert kl_penalties(new, old)[0].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("log_ratio", [20.0, 89.0, 1e4, -89.0])
def test_far_ratios_and_their_gradients_are_bounded(log_ratio: float) -> None:
    new = torch.tensor([log_ratio], requires_grad=True)
    loss = clipped_policy_losses(new, torch.tensor([-1.0]), **CLIP)
    (gradient,) = torch.autograd.grad(loss, new)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient)
    assert loss.item() <= math.exp(20.0) * 1.001
    assert abs(log_ratio) == 20.0 or gradient.item() == 0.0
    assert torch.isfinite(bounded_ratios(new)).all()


def test_dual_clip_bounds_only_bad_tokens() -> None:
    new = torch.tensor([1.0, 2.0, 2.0], requires_grad=True)
    advantages = torch.tensor([-0.5, -0.5, 0.5])
    losses = clipped_policy_losses(new, advantages, **CLIP, dual_clip=3.0)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([math.e / 2, 1.5, -0.65])
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([math.e / 2, 0.0, 0.0])
    settings = AlgorithmConfig.model_validate(CLIP | {"dual_clip": 3.0})
    figures = clip_figures(new.detach(), advantages, torch.ones(3, dtype=torch.bool), settings)
    assert figures["actor/pg_clipfrac_lower"] == 1.0
    assert (figures["actor/clipfrac_low"], figures["actor/clipfrac_high"]) == (0.0, 1.0)


def test_weights_of_sequences_and_rejection() -> None:
    """One response has the ratios 2 and 3. Another has 0.5, 1 and a token that does not count."""
    log_ratios = torch.tensor([2.0, 3.0, 0.5, 1.0, 1.0]).log()
    counted = torch.tensor([True, True, True, True, False])

    def weights(**settings: object) -> list[float]:
        found, _ = importance_weights(log_ratios, counted, [2, 3], **settings)
        return found.tolist()

    assert weights(cap=2.5) == pytest.approx([2.0, 2.5, 0.5, 1.0, 1.0])
    assert weights(cap=5.0, level="sequence") == pytest.approx([5.0, 5.0, 0.5, 0.5, 0.5])
    assert weights(cap=1.9, reject=True) == pytest.approx([0.0, 0.0, 0.0, 1.0, 1.0])
    together = weights(cap=3.0, level="sequence", reject=True)
    assert together == pytest.approx([0.0, 0.0, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_are_bounded_and_those_of_the_formula(estimator: str) -> None:
    new = torch.tensor([-1.0, -2.0, -500.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -1.0, -500.0], dtype=torch.float64)
    found = kl_penalties(new, reference, estimator)
    d = [0.5, -1.0, -20.0, 20.0]
    formulas = {
        "k1": d,
        "k2": [one * one / 2 for one in d],
        "k3": [min(MAX_KL, math.exp(-one) + one - 1) for one in d],
    }
    assert found.tolist() == pytest.approx(formulas[estimator])
    (gradient,) = torch.autograd.grad(found.sum(), new)
    slopes = {"k1": [1.0, 1.0], "k2": [0.5, -1.0], "k3": [1 - math.exp(-0.5), 1 - math.e]}
    assert gradient.tolist() == pytest.approx([*slopes[estimator], 0.0, 0.0])
