"""On-policy distillation: learn each token from a teacher's probability of it."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from refrain.engines.learn.objectives.ratios import MAX_LOG_RATIO


def taught_advantages(
    advantages: Float[Tensor, "tokens"],
    inference_logprobs: Float[Tensor, "tokens"],
    teacher_logprobs: Float[Tensor, "tokens"],
    counted: Bool[Tensor, "tokens"],
    reward_weight: float,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, ""]]:
    """Return `w A + log pi_teacher - log pi` per token, and the sum of `log pi - log pi_teacher`.

    The second term's mean is minus the reverse KL divergence KL(pi || pi_teacher), whose policy
    gradient this is, each token apart from those that follow. pi is the engine's policy, which drew
    the tokens. `w`: `reward_weight`. Tokens that do not count keep their advantage.

    Source: GKD (arXiv:2306.13649, section 3, on-policy data and reverse KL) and "On-Policy
    Distillation" (Thinking Machines Lab, 2025, with a discount of 0). A deviation: the difference
    is clamped to MAX_LOG_RATIO on both sides.
    """
    difference = (teacher_logprobs - inference_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    difference = torch.where(counted, difference, 0.0)
    taught = torch.where(counted, reward_weight * advantages, advantages) + difference
    return taught, -difference.sum()
