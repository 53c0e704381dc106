"""PPO's clipped loss, as GRPO and most other types use it."""

import torch
from jaxtyping import Float
from torch import Tensor

from refrain.engines.learn.objectives.ratios import bounded_ratios
from refrain.engines.learn.objectives.tokens import PolicyLosses, PolicyTokens
from refrain.schemas.algorithm import AlgorithmConfig


def clipped(tokens: PolicyTokens, algorithm: AlgorithmConfig) -> PolicyLosses:
    """Return PPO's losses of tokens, whose ratio is pi / pi_old."""
    return clipped_at(tokens.log_ratios, tokens, algorithm)


def clipped_at(
    log_ratios: Float[Tensor, "tokens"], tokens: PolicyTokens, algorithm: AlgorithmConfig
) -> PolicyLosses:
    """Return PPO's losses of tokens with these log-ratios."""
    ratio, advantages = bounded_ratios(log_ratios), tokens.advantages
    bounds = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    losses = clipped_policy_losses(log_ratios, advantages, **bounds, dual_clip=algorithm.dual_clip)
    low = (ratio < 1.0 - algorithm.clip_low) & (advantages < 0.0) & tokens.counted
    high = (ratio > 1.0 + algorithm.clip_high) & (advantages > 0.0) & tokens.counted
    return PolicyLosses(losses, log_ratios, low, high)


def clipped_policy_losses(
    log_ratios: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Float[Tensor, "tokens"]:
    """Return `-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)` per token; rho is pi / pi_old.

    Source: PPO (arXiv:1707.06347, equation 7) as used by GRPO (arXiv:2402.03300, equation 3).
    `clip_high > clip_low` is DAPO's clip-higher (arXiv:2503.14476, section 3.1). With `dual_clip`,
    the loss is at most `-dual_clip A` where A < 0 (arXiv:1912.09729, equation 5).

    Two deviations from equation 3: the KL term is separate (`kl_penalties`), and rho is bounded
    (`bounded_ratios`).

    pi_old is the rollout engine's policy, which needs no second forward pass. With
    `importance_weights` it is the trainer's policy before the step.
    """
    ratio = bounded_ratios(log_ratios)
    near = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = -torch.minimum(ratio * advantages, near * advantages)
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0.0, torch.minimum(losses, -dual_clip * advantages), losses)
