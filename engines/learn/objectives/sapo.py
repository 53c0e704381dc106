"""SAPO: a soft gate in place of the clip."""

import torch

from refrain.engines.learn.objectives.ratios import bounded_ratios
from refrain.engines.learn.objectives.tokens import PolicyLosses, PolicyTokens
from refrain.schemas.algorithm import AlgorithmConfig


def sapo(tokens: PolicyTokens, algorithm: AlgorithmConfig) -> PolicyLosses:
    """Return `-(4 / tau) sigmoid(tau (rho - 1)) A` per token, where tau is `tau_pos` for A > 0 and
    `tau_neg` otherwise, and rho is pi / pi_old.

    Source: Soft Adaptive Policy Optimization (arXiv:2511.20347). At rho = 1 the gradient
    is that of `-rho A`. It falls smoothly on both sides of 1, for either sign of A, and no token
    loses all of it. So `low` and `high` are empty.
    """
    right = tokens.advantages > 0.0
    tau = torch.full_like(tokens.advantages, algorithm.tau_neg)
    tau = tau.masked_fill(right, algorithm.tau_pos)
    gate = 4.0 / tau * torch.sigmoid(tau * (bounded_ratios(tokens.log_ratios) - 1.0))
    none = torch.zeros_like(tokens.counted)
    return PolicyLosses(-gate * tokens.advantages, tokens.log_ratios, none, none)
