"""DPPO: leave out tokens by how far their probability moved, not by their ratio."""

import torch
from jaxtyping import Float
from torch import Tensor

from refrain.engines.learn.objectives.ratios import bounded_ratios
from refrain.engines.learn.objectives.tokens import PolicyLosses, PolicyTokens
from refrain.schemas.algorithm import AlgorithmConfig


def dppo(tokens: PolicyTokens, algorithm: AlgorithmConfig) -> PolicyLosses:
    """Return `-M rho A` per token. M is 0 where rho moves further in the direction of A, away from
    1, although the divergence is above `max_divergence`; otherwise M is 1. rho is pi / mu, and mu
    the engine's policy.

    Source: "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv:2602.04879), with its
    binary approximations of the divergence. veRL also bounds rho, at `clip_ratio_c`.
    """
    far = _divergences(tokens, algorithm) > algorithm.max_divergence
    rho, advantages = tokens.log_ratios, tokens.advantages
    low = far & (rho < 0.0) & (advantages < 0.0) & tokens.counted
    high = far & (rho > 0.0) & (advantages > 0.0) & tokens.counted
    losses = torch.where(low | high, 0.0, -bounded_ratios(rho) * advantages)
    return PolicyLosses(losses, rho, low, high)


@torch.no_grad()
def _divergences(tokens: PolicyTokens, algorithm: AlgorithmConfig) -> Float[Tensor, "tokens"]:
    """Return the divergence of mu and pi over two outcomes: the sampled token and any other. `tv`:
    `|mu - pi|`. `kl`: `mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))`."""
    pi, mu = tokens.logprobs.exp(), (tokens.logprobs - tokens.log_ratios).exp()
    if algorithm.divergence == "tv":
        return (mu - pi).abs()
    rest, before = (1.0 - pi).clamp(min=1e-7), (1.0 - mu).clamp(min=1e-7)
    return -mu * tokens.log_ratios + before * (before / rest).log()
