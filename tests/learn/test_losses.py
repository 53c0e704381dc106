"""Losses, ratios, importance weights and KL estimates, against formulas written by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.learn.diagnostics import Sums, clip_figures
from refrain.engines.learn.objectives.aggregation import token_weights
from refrain.engines.learn.objectives.clipped import clipped, clipped_policy_losses
from refrain.engines.learn.objectives.importance import importance_weights
from refrain.engines.learn.objectives.kl import MAX_KL, kl_penalties
from refrain.engines.learn.objectives.ratios import bounded_ratios, sequence_log_ratios
from refrain.engines.learn.objectives.tokens import PolicyTokens
from refrain.schemas.algorithm import AlgorithmConfig

AGGREGATIONS = ["token_mean", "sequence_mean", "fixed_length"]
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def figures_of(
    log_ratios: torch.Tensor, advantages: torch.Tensor, counted: torch.Tensor, **given: float
) -> Sums:
    """Return the clip's metrics of tokens with these log-ratios."""
    settings = AlgorithmConfig.model_validate(CLIP | given)
    log_ratios = log_ratios.detach()
    tokens = PolicyTokens(log_ratios, log_ratios, advantages, counted, [len(log_ratios)])
    return clip_figures(clipped(tokens, settings), advantages, counted, settings.dual_clip)


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
        statistics = figures_of(new - old, advantages, torch.tensor([counts]))
        assert statistics["actor/pg_clipfrac"] == float(counts and not gradient_flows)
        assert bool(statistics["actor/ratio_mean"] > 0) == counts


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
    figures = figures_of(new, advantages, torch.ones(3, dtype=torch.bool), dual_clip=3.0)
    assert figures["actor/pg_clipfrac_lower"] == 1.0
    assert (figures["actor/clipfrac_low"], figures["actor/clipfrac_high"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("mode", "bounds", "expected"),
    [
        ("token_truncate", {"cap": 2.5}, [2.0, 2.5, 0.5, 1.0, 1.0]),
        ("sequence_truncate", {"cap": 5.0}, [5.0, 5.0, 0.5, 0.5, 0.5]),
        ("token_mask", {"cap": 1.9}, [0.0, 0.0, 0.0, 1.0, 1.0]),
        ("token_mask", {"cap": 2.5, "floor": 0.5}, [2.0, 0.0, 0.5, 1.0, 1.0]),
        ("token_mask", {"cap": 1.9, "floor": 0.0}, [0.0, 0.0, 0.5, 1.0, 1.0]),
        ("sequence_mask", {"cap": 3.0}, [0.0, 0.0, 0.5, 0.5, 0.5]),
        ("geometric_mask", {"cap": 2.5}, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("geometric_mask", {"cap": 2.5, "floor": 0.75}, [1.0, 1.0, 0.0, 0.0, 0.0]),
        ("geometric_mask", {"cap": 2.4}, [0.0, 0.0, 1.0, 1.0, 1.0]),
    ],
)
def test_weights_by_token_and_sequence(mode: str, bounds: dict, expected: list[float]) -> None:
    """One response has the ratios 2 and 3, with a geometric mean of 2.45. Another has 0.5, 1 and a
    token that does not count, and one of 0.71."""
    log_ratios = torch.tensor([2.0, 3.0, 0.5, 1.0, 1.0]).log()
    counted = torch.tensor([True, True, True, True, False])
    found, beyond = importance_weights(log_ratios, counted, [2, 3], mode=mode, **bounds)
    assert found.tolist() == pytest.approx(expected)
    if mode.endswith("mask"):
        assert beyond.tolist() == [weight == 0.0 for weight in expected]


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
