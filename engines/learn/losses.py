"""The clipped policy-gradient loss on packed tokens.

Every function takes one value per sampled token, for all samples one after another. The weights
already contain the denominators of the whole minibatch. So a minibatch's loss is the plain sum over
micro-batches and trainer processes, however it is split.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Nats at which log-ratios are clamped on both sides before exp, as in veRL. exp(20) is 4.9e8;
beyond it there is no gradient."""
MAX_KL = 10.0
"""Nats at which a token's k3 estimate is clamped, as in veRL."""


def token_weights(
    counted: Sequence[NDArray[np.bool_]],
    aggregation: str,
    *,
    total_tokens: int,
    total_sequences: int,
    max_response_tokens: int,
) -> list[NDArray[np.float32]]:
    """Return the weight of each token in the loss, given the totals of the WHOLE minibatch.

    `token_mean`: 1 / total_tokens (DAPO, arXiv:2503.14476, section 3.3).

    `sequence_mean`: 1 / (total_sequences * |o_i|) (DeepSeekMath, arXiv:2402.03300, equation 3).

    `fixed_length`: 1 / (total_sequences * max_response_tokens) (Dr. GRPO, arXiv:2503.20783, section
    3.2; its `masked_mean` by the generation budget).

    `counted` marks the tokens of the given samples that count. Other tokens have weight 0 and are
    in no denominator: |o_i| and `total_tokens` are counted tokens, and `total_sequences` are
    samples with such a token. Over the whole minibatch the weights sum to 1, except with
    `fixed_length`.
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
    """Return `log s_i` at each token of sequence i: the mean log-ratio of its counted tokens. Each
    token keeps its own gradient, so that token weights weigh token gradients.

    `s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|)` (GSPO, arXiv:2507.18071, section 4.1, equation 7)
    and `s_i,t = sg[s_i] pi(y_t) / sg[pi(y_t)]` (section 4.3, equation 14), as in veRL. With the
    aggregation `sequence_mean`, loss and gradient are those of equation 5, as long as all tokens of
    a response have the same weight. A deviation: |y_i| counts only the tokens that count, which are
    all tokens unless some are too old.

    `log_ratios` are 0 where tokens do not count. `num_tokens`: length of each sequence.
    """
    means = _over_sequences(log_ratios.detach(), counted, num_tokens, "mean")
    return means + (log_ratios - log_ratios.detach())


def _over_sequences(
    values: Float[Tensor, "tokens"],
    counted: Bool[Tensor, "tokens"],
    num_tokens: Sequence[int],
    how: Literal["mean", "sum"],
) -> Float[Tensor, "tokens"]:
    """Return the mean or sum over each sequence's counted tokens, at each of its tokens. `values`
    are 0 where tokens do not count."""
    sequences = zip(values.split(num_tokens), counted.split(num_tokens), strict=True)
    divisors = (tokens.sum().clamp(min=1) if how == "mean" else 1 for _, tokens in sequences)
    sums = (own.sum() for own in values.split(num_tokens))
    parts = zip(sums, divisors, num_tokens, strict=True)
    return torch.cat([(total / divisor).expand(length) for total, divisor, length in parts])


def bounded_ratios(log_ratios: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """Return the ratios, clamped to `exp(MAX_LOG_RATIO)` and its inverse. Clamped ratios have no
    gradient."""
    return torch.exp(log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


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
    `clip_high > clip_low` is DAPO's clip-higher (arXiv:2503.14476, section 3.1). With log-ratios of
    sequences, all tokens of a sequence share one rho (GSPO). With `dual_clip`, the loss is at most
    `-dual_clip A` where A < 0 (arXiv:1912.09729, equation 5).

    Two deviations from equation 3: the KL term is separate (`kl_penalties`), and rho is bounded
    (`bounded_ratios`).

    pi_old is the rollout engine's policy, which needs no second forward pass. With
    `importance_weights` it is the trainer's policy before the step.
    """
    ratio = bounded_ratios(log_ratios)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0.0, torch.minimum(losses, -dual_clip * advantages), losses)


def importance_weights(
    log_ratios: Float[Tensor, "tokens"],
    counted: Bool[Tensor, "tokens"],
    num_tokens: Sequence[int],
    *,
    cap: float,
    level: str = "token",
    reject: bool = False,
) -> tuple[Float[Tensor, "tokens"], Bool[Tensor, "tokens"]]:
    """Return `min(pi_old / pi_inference, cap)` per token, and where the cap was reached.

    Truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025). Multiply a token's policy loss by its weight. This corrects for
    tokens generated by another policy or with another numerical precision, while the clip keeps the
    new policy near pi_old. AReaL's decoupled objective (arXiv:2505.24298, section 5.2) does the
    same without a cap. Weights have no gradient, do not apply to the KL term, and follow `level`
    even when the policy ratio is per sequence.

    `log_ratios`: log pi_old - log pi_inference, 0 where tokens do not count. At level "sequence"
    the ratio is the product over a response (Liu et al., "When Speed Kills Stability", 2025). With
    `reject`, weights above the cap or below its inverse become 0 (masked importance sampling). A
    deviation from veRL's rejection: rejected tokens stay in the denominators.
    """
    log_ratios = log_ratios.detach()
    if level == "sequence":
        log_ratios = _over_sequences(log_ratios, counted, num_tokens, "sum")
    ratio = bounded_ratios(log_ratios)
    if reject:
        outside = (ratio > cap) | (ratio < 1.0 / cap)
        return torch.where(outside, 0.0, ratio), outside
    return ratio.clamp(max=cap), ratio > cap


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
