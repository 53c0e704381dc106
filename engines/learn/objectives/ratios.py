"""Ratios of two policies, by token and by sequence."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Nats at which log-ratios are clamped on both sides before exp, as in veRL. exp(20) is 4.9e8;
beyond it there is no gradient."""


def bounded_ratios(log_ratios: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """Return the ratios, clamped to `exp(MAX_LOG_RATIO)` and its inverse. Clamped ratios have no
    gradient."""
    return torch.exp(log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_log_ratios(
    log_ratios: Float[Tensor, "tokens"],
    counted: Bool[Tensor, "tokens"],
    num_tokens: Sequence[int],
) -> Float[Tensor, "tokens"]:
    """Return at each token of a sequence the mean log-ratio of its counted tokens. Each token keeps
    its own gradient, so that token weights weigh token gradients.

    `log_ratios` are 0 where tokens do not count. `num_tokens`: length of each sequence.
    """
    means = over_sequences(log_ratios.detach(), counted, num_tokens, "mean")
    return means + (log_ratios - log_ratios.detach())


def over_sequences(
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
