"""REINFORCE: the plain policy gradient."""

import torch

from refrain.engines.learn.objectives.tokens import PolicyLosses, PolicyTokens
from refrain.schemas.algorithm import AlgorithmConfig


def reinforce(tokens: PolicyTokens, _algorithm: AlgorithmConfig) -> PolicyLosses:
    """Return `-A log pi` per token (Williams, 1992), without a ratio or a clip.

    With the group's mean as baseline and `fixed_length`, the gradient is that of Dr. GRPO
    (arXiv:2503.20783, section 3.2) where pi is pi_old. `sequence_mean` divides a response's
    gradient by its length, and `token_mean` is GPG's (arXiv:2504.02546). Tokens of an older policy
    bias the gradient, unless `tis_cap` weighs them.
    """
    none = torch.zeros_like(tokens.counted)
    return PolicyLosses(-tokens.advantages * tokens.logprobs, tokens.log_ratios, none, none)
