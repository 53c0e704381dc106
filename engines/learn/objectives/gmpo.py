"""GMPO: the geometric mean of a sequence's clipped ratios."""

import math

import torch

from refrain.engines.learn.objectives.ratios import bounded_ratios, sequence_log_ratios
from refrain.engines.learn.objectives.tokens import PolicyLosses, PolicyTokens
from refrain.schemas.algorithm import AlgorithmConfig


def gmpo(tokens: PolicyTokens, algorithm: AlgorithmConfig) -> PolicyLosses:
    """Return `-A (prod over t of rho_t')^(1 / |o|)` at each token of a sequence. rho_t' is rho_t,
    at most 1 + clip_high where A > 0, and at least 1 - clip_low where A < 0.

    Source: Geometric-Mean Policy Optimization (arXiv:2507.20673, section 3). With
    the aggregation `sequence_mean`, loss and gradient are the paper's. Its clip is (e^-0.4, e^0.4),
    which is `clip_low` 0.3297 and `clip_high` 0.4918. veRL takes the logarithms 0.4 as settings.
    """
    rho, right = tokens.log_ratios, tokens.advantages > 0.0
    top = math.log1p(algorithm.clip_high)
    bottom = math.log1p(-algorithm.clip_low) if algorithm.clip_low < 1.0 else -math.inf
    near = torch.where(right, rho.clamp(max=top), rho.clamp(min=bottom))
    means = sequence_log_ratios(near, tokens.counted, tokens.num_tokens)
    low = (rho < bottom) & (tokens.advantages < 0.0) & tokens.counted
    high = (rho > top) & right & tokens.counted
    return PolicyLosses(-tokens.advantages * bounded_ratios(means), rho, low, high)
