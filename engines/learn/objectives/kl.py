"""The KL penalty as a term of the loss. `reward_kl` subtracts it from rewards instead."""

import torch
from jaxtyping import Float
from torch import Tensor

from refrain.engines.learn.objectives.ratios import MAX_LOG_RATIO

MAX_KL = 10.0
"""Nats at which a token's k3 estimate is clamped, as in veRL."""


def kl_penalties(
    trainer_logprobs: Float[Tensor, "tokens"],
    reference_logprobs: Float[Tensor, "tokens"],
    estimator: str = "k3",
) -> Float[Tensor, "tokens"]:
    """Return an estimate of KL(pi || pi_ref) per token, from `d = log pi - log pi_ref`.

    `k1`: d. `k2`: d^2 / 2. `k3`: `exp(-d) + d - 1`, never negative (Schulman, "Approximating KL
    divergence", 2020; arXiv:2402.03300, equation 4). Deviations, as in veRL: d is clamped to
    MAX_LOG_RATIO on both sides and k3 to MAX_KL. There is no gradient beyond these bounds.
    """
    difference = trainer_logprobs - reference_logprobs
    difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2.0
    return (torch.expm1(-difference) + difference).clamp(max=MAX_KL)
