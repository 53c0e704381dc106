"""The clipped policy-gradient loss on packed tokens.

Every function takes one value per response token, of all samples one after another, and weights
that already contain the denominators of the whole minibatch. The loss of a minibatch is then the
plain sum over micro-batches and trainer processes, however they were cut.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean"]


def token_weights(
    num_response_tokens: Sequence[int],
    aggregation: Aggregation,
    *,
    total_tokens: int,
    total_sequences: int,
) -> NDArray[np.float32]:
    """Weight of each token in the loss, given the totals of the WHOLE minibatch.

    `token_mean`: 1 / total_tokens (DAPO, arXiv:2503.14476, section 3.3).
    `sequence_mean`: 1 / (total_sequences * |o_i|) (DeepSeekMath, arXiv:2402.03300, equation 3).

    Over all samples of the minibatch the weights add up to 1.

    Args:
        num_response_tokens: of the samples at hand, each at least 1.

    Returns:
        Shape [sum(num_response_tokens)].
    """
    lengths = np.asarray(num_response_tokens)
    if aggregation == "token_mean":
        per_sample = np.full(len(lengths), 1.0 / total_tokens)
    else:
        per_sample = 1.0 / (total_sequences * lengths)
    return np.repeat(per_sample, lengths).astype(np.float32)


def clipped_policy_losses(
    trainer_logprobs: Float[Tensor, "tokens"],
    old_logprobs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "tokens"]:
    """`-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)` with `rho = pi / pi_old`, per token.

    PPO (arXiv:1707.06347, equation 7) as used by GRPO (arXiv:2402.03300, equation 3);
    `clip_high > clip_low` is DAPO's clip-higher (arXiv:2503.14476, section 3.1). `old_logprobs`
    are the rollout engine's own, so no second forward pass is needed to recompute them. A
    deviation from equation 3: the KL term is separate (`kl_penalties`).
    """
    ratio = torch.exp(trainer_logprobs - old_logprobs)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def kl_penalties(
    trainer_logprobs: Float[Tensor, "tokens"],
    reference_logprobs: Float[Tensor, "tokens"],
) -> Float[Tensor, "tokens"]:
    """The k3 estimate of KL(pi || pi_ref) per token, never negative.

    `exp(d) - d - 1` with `d = log pi_ref - log pi` (Schulman, "Approximating KL divergence", 2020;
    arXiv:2402.03300, equation 4).
    """
    log_ratio = reference_logprobs - trainer_logprobs
    return torch.exp(log_ratio) - log_ratio - 1.0


def policy_statistics(
    trainer_logprobs: Float[Tensor, "tokens"],
    old_logprobs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> dict[str, Float[Tensor, ""]]:
    """Sums over tokens for the metrics; divide by the minibatch's number of tokens.

    `actor/pg_clipfrac`: tokens whose gradient the clip took away. `actor/ppo_kl`: the k1 estimate
    of KL(pi_old || pi), `log pi_old - log pi`, which can be negative.
    """
    log_ratio = trainer_logprobs - old_logprobs
    ratio = torch.exp(log_ratio)
    too_high = (ratio > 1.0 + clip_high) & (advantages > 0)
    too_low = (ratio < 1.0 - clip_low) & (advantages < 0)
    return {
        "actor/pg_clipfrac": (too_high | too_low).sum().float(),
        "actor/ppo_kl": -log_ratio.sum(),
        "actor/ratio_mean": ratio.sum(),
        "actor/rollout_logprob_diff": log_ratio.abs().sum(),
    }
