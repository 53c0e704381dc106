"""CISPO: clip the weight of a token's gradient, not its gradient."""

from refrain.engines.learn.objectives.ratios import bounded_ratios
from refrain.engines.learn.objectives.tokens import PolicyLosses, PolicyTokens
from refrain.schemas.algorithm import AlgorithmConfig


def cispo(tokens: PolicyTokens, algorithm: AlgorithmConfig) -> PolicyLosses:
    """Return `-sg[clip(rho, 1 - clip_low, 1 + clip_high)] A log pi` per token; rho is pi / pi_old.

    Source: MiniMax-M1 (arXiv:2506.13585, section 3.1, equations 4 and 5). Every token keeps a
    gradient. The paper has no lower bound, which is `clip_low` 1. It tunes the upper one without a
    value: 1 + `clip_high` is 5 by default, as in ScaleRL (arXiv:2510.13786). `low` and `high` are
    tokens with a clipped weight. veRL counts those of either sign of the advantage.
    """
    weight = bounded_ratios(tokens.log_ratios.detach())
    bottom, top = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    losses = -weight.clamp(bottom, top) * tokens.advantages * tokens.logprobs
    low = (weight < bottom) & (tokens.advantages < 0.0) & tokens.counted
    high = (weight > top) & (tokens.advantages > 0.0) & tokens.counted
    return PolicyLosses(losses, tokens.log_ratios, low, high)
