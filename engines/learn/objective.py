"""The loss of a micro-batch, from the log-probabilities of its tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from engines.learn.diagnostics import (
    Sums,
    clip_figures,
    clipped_tokens,
    mismatch_figures,
    staleness_figures,
)
from engines.learn.losses import (
    clipped_policy_losses,
    importance_weights,
    sequence_log_ratios,
)
from engines.learn.minibatch import Share
from engines.learn.own_functions import own_functions
from schemas.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class LossTokens:
    """Values per predicted token of a micro-batch, on the policy's device."""

    num_tokens: list[int]
    """Sampled tokens of each sample."""
    inference_logprobs: Float[Tensor, "tokens"]
    old_logprobs: Float[Tensor, "tokens"] | None
    advantages: Float[Tensor, "tokens"]
    weights: Float[Tensor, "tokens"]
    counted: Bool[Tensor, "tokens"]
    staleness: Int[Tensor, "tokens"]
    max_staleness: int
    """Largest staleness for which the metrics have figures of their own."""

    @classmethod
    def none(cls, num_tokens: int, share: Share, device: torch.device) -> "LossTokens":
        """Return tokens that do not count, for a pass of this share."""
        zeros = torch.zeros(num_tokens, device=device)
        arrays = (zeros, zeros, zeros, zeros, zeros.bool(), zeros.int())
        return cls([num_tokens], *arrays, share.max_staleness)

    @classmethod
    def gather(cls, samples: tuple[int, ...], share: Share, device: torch.device) -> "LossTokens":
        """Gather the tokens of these samples of the share."""
        chosen = [share.samples[at] for at in samples]
        num_tokens = [sample.rollout.num_response_tokens for sample in chosen]
        advantages = np.array([sample.advantage for sample in chosen], np.float32)

        def gather(values: list[NDArray]) -> Tensor:
            return torch.from_numpy(np.concatenate(values)).to(device)

        def gather_own(values: list[NDArray]) -> Tensor:
            return gather([values[at] for at in samples])

        return cls(
            num_tokens=num_tokens,
            inference_logprobs=gather([sample.rollout.inference_logprobs for sample in chosen]),
            old_logprobs=None if share.old_logprobs is None else gather_own(share.old_logprobs),
            advantages=torch.from_numpy(np.repeat(advantages, num_tokens)).to(device),
            weights=gather_own(share.weights),
            counted=gather([sample.counted for sample in chosen]),
            staleness=gather([sample.staleness for sample in chosen]),
            max_staleness=share.max_staleness,
        )


def policy_loss(
    logprobs: Float[Tensor, "tokens"], tokens: LossTokens, algorithm: AlgorithmConfig
) -> tuple[Float[Tensor, ""], Sums]:
    """Return the clipped loss and its part of the metrics. With `tis_cap`, importance weights
    correct for tokens that another policy generated.

    pi_old is the trainer's policy before the step with `tis_cap`, and the engine's policy without.
    """
    before = logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    old = tokens.inference_logprobs if algorithm.tis_cap is None else before
    # Set tokens that do not count to zero before any exp: an infinite ratio times weight 0 is NaN.
    log_ratios = torch.where(tokens.counted, logprobs - old, 0.0)
    if algorithm.importance_ratio == "sequence":
        log_ratios = sequence_log_ratios(log_ratios, tokens.counted, tokens.num_tokens)
    losses = _losses(log_ratios, tokens.advantages, algorithm)
    mismatch = torch.where(tokens.counted, before - tokens.inference_logprobs, 0.0)
    sums: Sums = {}
    if algorithm.tis_cap is not None:
        level, _, beyond_cap = algorithm.tis_mode.partition("_")
        weights, beyond = importance_weights(
            mismatch,
            tokens.counted,
            tokens.num_tokens,
            cap=algorithm.tis_cap,
            level=level,
            reject=beyond_cap == "mask",
        )
        losses = losses * weights
        sums["actor/tis_mean"] = (weights * tokens.counted).sum()
        sums["actor/tis_truncated"] = (beyond & tokens.counted).sum().float()
    loss = (losses * tokens.weights).sum()
    sums["actor/pg_loss"] = loss.detach()
    with torch.no_grad():
        sums |= clip_figures(log_ratios, tokens.advantages, tokens.counted, algorithm)
        sums |= mismatch_figures(mismatch, tokens.counted)
        if tokens.max_staleness:
            low, high = clipped_tokens(log_ratios, tokens.advantages, tokens.counted, algorithm)
            stale = torch.where(tokens.counted, tokens.staleness, -1)
            sums |= staleness_figures(stale, mismatch, low | high, tokens.max_staleness)
    return loss, sums


def _losses(
    log_ratios: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    algorithm: AlgorithmConfig,
) -> Float[Tensor, "tokens"]:
    own = own_functions(algorithm.file)
    if own.loss is not None:
        return own.losses(log_ratios, advantages, algorithm)
    return clipped_policy_losses(
        log_ratios,
        advantages,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )
