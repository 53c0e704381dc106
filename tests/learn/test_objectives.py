"""Every policy loss and its gradient equal a float64 loop over the paper's formula, `loop.py`."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from refrain.engines.learn.objective import OBJECTIVES
from refrain.engines.learn.objectives.maxrl import maxrl_advantage
from refrain.engines.learn.objectives.opo import opo_advantage
from refrain.engines.learn.objectives.ratios import bounded_ratios
from refrain.engines.learn.objectives.reward_kl import kl_rewards
from refrain.engines.learn.objectives.tokens import PolicyLosses, PolicyTokens
from refrain.schemas.algorithm import LOSSES, SETTINGS, AlgorithmConfig
from tests.learn.conftest import make_batch, started
from tests.learn.loop import response_losses

CASES: dict[str, dict[str, Any]] = {
    **{name: {"type": name} for name in ("grpo", *sorted(LOSSES))},
    "cispo with a lower bound": {"type": "cispo", "clip_low": 0.4, "clip_high": 0.5},
    "sapo, other temperatures": {"type": "sapo", "tau_pos": 2.0, "tau_neg": 3.0},
    "gmpo without a lower bound": {"type": "gmpo", "clip_low": 1.0},
    "dppo by kl": {"type": "dppo", "divergence": "kl", "max_divergence": 0.05},
}
UNBOUNDED = ("sapo", "reinforce")
LENGTHS, ADVANTAGES = [5, 1, 8, 6, 4], [1.5, -0.7, -2.0, 0.4, 0.0]


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """Return log pi, log pi_old and which tokens count. Ratios are from 0.1 to 10."""
    generator = torch.Generator().manual_seed(1)
    size = sum(LENGTHS)
    old = -3.0 * torch.rand(size, generator=generator, dtype=torch.float64) - 0.05
    moved = 0.9 * torch.randn(size, generator=generator, dtype=torch.float64)
    old[0], moved[0] = -3.0, 2.0
    new = (old + moved).clamp(max=-0.02).requires_grad_()
    counted = torch.rand(size, generator=generator) < 0.8
    counted[np.cumsum([0, *LENGTHS[:-1]])] = True
    return new, old, counted


def computed(new: Tensor, old: Tensor, counted: Tensor, algorithm: AlgorithmConfig) -> PolicyLosses:
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    tokens = PolicyTokens(
        logprobs=torch.where(counted, new, 0.0),
        log_ratios=torch.where(counted, new - old, 0.0),
        advantages=advantages.repeat_interleave(torch.tensor(LENGTHS)),
        counted=counted,
        num_tokens=LENGTHS,
    )
    return OBJECTIVES[algorithm.policy_loss](tokens, algorithm)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_the_formulas(name: str) -> None:
    algorithm = AlgorithmConfig.model_validate(CASES[name])
    new, old, counted = drawn()
    found = computed(new, old, counted, algorithm)
    parts = zip(*(values.split(LENGTHS) for values in (new, old, counted)), ADVANTAGES, strict=True)
    tokens, scales = [], []
    for own, before, counts, advantage in parts:
        expected = response_losses(own[counts], before[counts], advantage, algorithm)
        tokens += expected
        scales += [1.0 / len(expected)] * len(expected)
    scale = torch.tensor(scales, dtype=torch.float64)
    losses = torch.stack([token.loss for token in tokens])
    torch.testing.assert_close(found.losses[counted], losses, atol=1e-12, rtol=1e-12)
    (gradient,) = torch.autograd.grad((found.losses[counted] * scale).sum(), new)
    (reference,) = torch.autograd.grad((losses * scale).sum(), new)
    torch.testing.assert_close(gradient, reference, atol=1e-12, rtol=1e-12)
    assert not gradient[~counted].any()
    ratios = [token.ratio for token in tokens]
    assert bounded_ratios(found.log_ratios)[counted].tolist() == pytest.approx(ratios)
    for bound, side in (
        (found.low, [token.low for token in tokens]),
        (found.high, [token.high for token in tokens]),
    ):
        assert bound[counted].tolist() == side
        assert not bound[~counted].any()
    acts = found.low.any() or found.high.any()
    assert acts == (algorithm.policy_loss not in UNBOUNDED), "the case exercises no bound"


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_without_a_move_the_gradient_is_that_of_reinforce(name: str) -> None:
    """At pi = pi_old each objective's gradient is `-A grad(log pi)`, with its response's weight."""
    _, old, _ = drawn()
    new, everything = old.clone().requires_grad_(), torch.ones(len(old), dtype=torch.bool)
    kinds = {AlgorithmConfig(type=kind).policy_loss: kind for kind in SETTINGS}
    algorithm = AlgorithmConfig.model_validate({"type": kinds[name]})
    computed(new, old, everything, algorithm).losses.sum().backward()
    expected = [
        -advantage for n, advantage in zip(LENGTHS, ADVANTAGES, strict=True) for _ in range(n)
    ]
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx(expected)


def test_maxrl_weighs_right_answers_by_the_rarity_of_theirs() -> None:
    """The paper averages the scores of the K right responses of N: 1 / K - 1 / N, times N."""
    for num_right in range(1, 5):
        group = np.array([1.0] * num_right + [0.0] * (4 - num_right))
        found = [maxrl_advantage(reward, group) for reward in group]
        assert found == pytest.approx([4 * (one / num_right - 1 / 4) for one in group])
    assert maxrl_advantage(0.0, np.zeros(4)) == 0.0
    with pytest.raises(ValueError, match=r"rewards \[-1.0, 1.0\].*set algorithm.scale_rewards"):
        maxrl_advantage(1.0, np.array([-1.0, 1.0]))


def test_opos_baseline_is_weighted_by_length() -> None:
    rewards, lengths = np.array([1.0, 0.0, 2.0]), np.array([10, 30, 5])
    baseline = (10 * 1.0 + 30 * 0.0 + 5 * 2.0) / 45
    found = [opo_advantage(reward, rewards, lengths) for reward in rewards]
    assert found == pytest.approx([reward - baseline for reward in rewards])
    assert opo_advantage(0.1, np.full(3, 0.1), lengths) == 0.0


def test_rewards_lose_the_kl_of_their_response() -> None:
    groups = [(1, "a"), (1, "b"), (1, "a")]
    found = kl_rewards([1.0, 0.5, 0.0], [2.0, -1.0, 4.0], groups, 0.1)
    assert [own for own, _ in found] == pytest.approx([0.8, 0.6, -0.4])
    assert [group.tolist() for _, group in found] == [
        pytest.approx(own) for own in ([0.8, -0.4], [0.6], [0.8, -0.4])
    ]


def test_a_kl_in_the_rewards_is_that_of_the_starting_policy(make_config: Any) -> None:
    """After a step the policy has moved, and the reference is still the start."""
    algorithm = {"type": "rloo", "reward_kl_coefficient": 0.3}
    learner, batch = started(make_config(algorithm, learning_rate=1e-2)), make_batch()
    rows = batch.to_pylist()
    sequences = [row["prompt_token_ids"] + row["response_token_ids"] for row in rows]
    starting, rewards = learner.logprobs(sequences, 0.7), {}
    kls = []
    for row, values in zip(rows, starting, strict=True):
        kls.append(np.sum(row["inference_logprobs"] - values[len(row["prompt_token_ids"]) - 1 :]))
        rewards.setdefault(row["prompt_key"], []).append(row["reward"] - 0.3 * kls[-1])
    learner.train_step(batch)
    metrics = learner.train_step(make_batch(policy_version=1))
    num_tokens = sum(len(row["response_token_ids"]) for row in rows)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(sum(kls) / num_tokens, rel=1e-4)
    assert metrics["critic/rewards/max"] == pytest.approx(max(map(max, rewards.values())), rel=1e-4)
    highest = max(
        one - (sum(own) - one) / (len(own) - 1) for own in rewards.values() for one in own
    )
    assert metrics["critic/advantages/max"] == pytest.approx(highest, rel=1e-4)
