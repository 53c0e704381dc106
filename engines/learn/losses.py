"""The clipped policy-gradient loss on packed tokens.

Every function takes one value per response token, of all samples one after another, and weights
that already contain the denominators of the whole minibatch. The loss of a minibatch is then the
plain sum over micro-batches and trainer processes, however they were cut.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor


def token_weights(
    counted: Sequence[NDArray[np.bool_]],
    aggregation: str,
    *,
    total_tokens: int,
    total_sequences: int,
    max_response_tokens: int,
) -> list[NDArray[np.float32]]:
    """Weight of each token in the loss, given the totals of the WHOLE minibatch.

    `token_mean`: 1 / total_tokens (DAPO, arXiv:2503.14476, section 3.3).
    `sequence_mean`: 1 / (total_sequences * |o_i|) (DeepSeekMath, arXiv:2402.03300, equation 3).
    `fixed_length`: 1 / (total_sequences * max_response_tokens) (Dr. GRPO, arXiv:2503.20783,
    section 3.2; its `masked_mean` by the generation budget).

    Tokens that do not count have weight 0 and are in no denominator: |o_i| and `total_tokens` are
    counted tokens, `total_sequences` samples with such a token. Over all samples of the minibatch
    the weights add up to 1, except those of `fixed_length`. `counted` is of the samples at hand.
    """

    def weight(num_counted: int) -> float:
        if aggregation == "token_mean":
            return 1.0 / max(1, total_tokens)
        length = max(1, num_counted) if aggregation == "sequence_mean" else max_response_tokens
        return 1.0 / (max(1, total_sequences) * length)

    return [tokens.astype(np.float32) * np.float32(weight(tokens.sum())) for tokens in counted]


def sequence_log_ratios(
    log_ratios: Float[Tensor, "tokens"],
    counted: Bool[Tensor, "tokens"],
    num_tokens: Sequence[int],
) -> Float[Tensor, "tokens"]:
    """`log s_i` at each token of sequence i: the mean of its counted tokens' log-ratios.

    `s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|)` (GSPO, arXiv:2507.18071, section 4.1, equation 7).
    With `sequence_mean` as the aggregation the loss is equation 5. A deviation: |y_i| are the
    tokens that count, all of them unless some are too old. `log_ratios` are 0 elsewhere;
    `num_tokens` are of the sequences, one after another.
    """
    sequences = zip(log_ratios.split(num_tokens), counted.split(num_tokens), strict=True)
    means = [values.sum() / tokens.sum().clamp(min=1) for values, tokens in sequences]
    pairs = zip(means, num_tokens, strict=True)
    return torch.cat([mean.expand(length) for mean, length in pairs])


def clipped_policy_losses(
    log_ratios: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "tokens"]:
    """`-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)` with `rho = pi / pi_old`, per token.

    PPO (arXiv:1707.06347, equation 7) as used by GRPO (arXiv:2402.03300, equation 3);
    `clip_high > clip_low` is DAPO's clip-higher (arXiv:2503.14476, section 3.1). Given the
    log-ratios of sequences, rho is the same for all tokens of one (GSPO). A deviation from
    equation 3: the KL term is separate (`kl_penalties`).

    pi_old is the rollout engine's policy, so that no second forward pass is needed, or with
    `truncated_weights` the trainer's before the step.
    """
    ratio = torch.exp(log_ratios)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def truncated_weights(
    old_logprobs: Float[Tensor, "tokens"],
    inference_logprobs: Float[Tensor, "tokens"],
    cap: float,
) -> tuple[Float[Tensor, "tokens"], Bool[Tensor, "tokens"]]:
    """`min(pi_old / pi_inference, cap)` per token, and where the cap was reached.

    Truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025): the policy loss of a token is multiplied by its weight, which
    corrects for tokens that another policy or another numerical precision generated, while the
    clip holds the new policy near pi_old (the decoupled objective of AReaL, arXiv:2505.24298,
    section 5.2, whose weights have no cap). No gradient flows through it. The KL term is not
    weighted, and with ratios of sequences the weights stay those of tokens.
    """
    ratio = torch.exp(old_logprobs - inference_logprobs).detach()
    return ratio.clamp(max=cap), ratio > cap


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
    log_ratios: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    counted: Bool[Tensor, "tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> dict[str, Float[Tensor, ""]]:
    """Sums over counted tokens for the metrics; divide by the minibatch's number of them.

    `actor/pg_clipfrac`: tokens whose gradient the clip took away. `actor/ppo_kl`: the k1 estimate
    of KL(pi_old || pi), `log pi_old - log pi`, which can be negative.
    """
    ratio = torch.exp(log_ratios)
    too_high = (ratio > 1.0 + clip_high) & (advantages > 0)
    too_low = (ratio < 1.0 - clip_low) & (advantages < 0)
    return {
        "actor/pg_clipfrac": ((too_high | too_low) & counted).sum().float(),
        "actor/ppo_kl": -(log_ratios * counted).sum(),
        "actor/ratio_mean": (ratio * counted).sum(),
    }
