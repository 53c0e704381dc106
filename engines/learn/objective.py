"""The loss of a micro-batch, from the log-probabilities of its tokens."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from refrain.engines.learn.diagnostics import (
    Sums,
    clip_figures,
    mismatch_figures,
    staleness_figures,
)
from refrain.engines.learn.minibatch import Share
from refrain.engines.learn.objectives.cispo import cispo
from refrain.engines.learn.objectives.clipped import clipped
from refrain.engines.learn.objectives.dppo import dppo
from refrain.engines.learn.objectives.gmpo import gmpo
from refrain.engines.learn.objectives.gspo import gspo
from refrain.engines.learn.objectives.importance import importance_weights
from refrain.engines.learn.objectives.reinforce import reinforce
from refrain.engines.learn.objectives.sapo import sapo
from refrain.engines.learn.objectives.tokens import Objective, PolicyLosses, PolicyTokens
from refrain.engines.learn.own_functions import own_functions
from refrain.schemas.algorithm import AlgorithmConfig

OBJECTIVES: dict[str, Objective] = {
    "clipped": clipped,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo": dppo,
    "reinforce": reinforce,
}
"""Policy losses by `AlgorithmConfig.policy_loss`."""


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
    teacher_logprobs: Float[Tensor, "tokens"] | None = None
    """Of a teacher on a server; None without one."""

    @classmethod
    def none(cls, num_tokens: int, share: Share, device: torch.device) -> "LossTokens":
        """Return tokens that do not count, for a pass of this share."""
        zeros = torch.zeros(num_tokens, device=device)
        arrays = (zeros, zeros, zeros, zeros, zeros.bool(), zeros.int())
        taught = None if share.teacher_logprobs is None else zeros
        return cls([num_tokens], *arrays, share.max_staleness, taught)

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

        def gather_known(values: list[NDArray] | None) -> Tensor | None:
            return None if values is None else gather_own(values)

        return cls(
            num_tokens=num_tokens,
            inference_logprobs=gather([sample.rollout.inference_logprobs for sample in chosen]),
            old_logprobs=gather_known(share.old_logprobs),
            advantages=torch.from_numpy(np.repeat(advantages, num_tokens)).to(device),
            weights=gather_own(share.weights),
            counted=gather([sample.counted for sample in chosen]),
            staleness=gather([sample.staleness for sample in chosen]),
            max_staleness=share.max_staleness,
            teacher_logprobs=gather_known(share.teacher_logprobs),
        )


def policy_loss(
    logprobs: Float[Tensor, "tokens"], tokens: LossTokens, algorithm: AlgorithmConfig
) -> tuple[Float[Tensor, ""], Sums]:
    """Return the policy loss and its part of the metrics. With `tis_cap`, importance weights
    correct for tokens that another policy generated.

    pi_old is the trainer's policy before the step with `tis_cap`, and the engine's policy without.
    """
    before = logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    old = tokens.inference_logprobs if algorithm.tis_cap is None else before
    found = _losses(_policy_tokens(logprobs, old, tokens), algorithm)
    mismatch = torch.where(tokens.counted, before - tokens.inference_logprobs, 0.0)
    weights, sums = _importance(mismatch, tokens, algorithm)
    loss = (found.losses * weights * tokens.weights).sum()
    sums["actor/pg_loss"] = loss.detach()
    with torch.no_grad():
        sums |= clip_figures(found, tokens.advantages, tokens.counted, algorithm.dual_clip)
        sums |= mismatch_figures(mismatch, tokens.counted)
        if tokens.max_staleness:
            stale = torch.where(tokens.counted, tokens.staleness, -1)
            bounded = found.low | found.high
            sums |= staleness_figures(stale, mismatch, bounded, tokens.max_staleness)
    return loss, sums


def _policy_tokens(
    logprobs: Float[Tensor, "tokens"], old: Float[Tensor, "tokens"], tokens: LossTokens
) -> PolicyTokens:
    # Set tokens that do not count to zero before any exp: an infinite ratio times weight 0 is NaN.
    return PolicyTokens(
        logprobs=torch.where(tokens.counted, logprobs, 0.0),
        log_ratios=torch.where(tokens.counted, logprobs - old, 0.0),
        advantages=tokens.advantages,
        counted=tokens.counted,
        num_tokens=tokens.num_tokens,
    )


def _losses(tokens: PolicyTokens, algorithm: AlgorithmConfig) -> PolicyLosses:
    found = OBJECTIVES[algorithm.policy_loss](tokens, algorithm)
    own = own_functions(algorithm.file)
    if own.loss is None:
        return found
    losses = own.losses(found.log_ratios, tokens.advantages, algorithm)
    return replace(found, losses=losses)


def _importance(
    mismatch: Float[Tensor, "tokens"], tokens: LossTokens, algorithm: AlgorithmConfig
) -> tuple[Float[Tensor, "tokens"] | float, Sums]:
    """Return the weights of the policy losses and their part of the metrics; 1 and nothing without
    `tis_cap`."""
    if algorithm.tis_cap is None:
        return 1.0, {}
    weights, beyond = importance_weights(
        mismatch,
        tokens.counted,
        tokens.num_tokens,
        cap=algorithm.tis_cap,
        floor=algorithm.tis_floor,
        mode=algorithm.tis_mode,
    )
    return weights, {
        "actor/tis_mean": (weights * tokens.counted).sum(),
        "actor/tis_truncated": (beyond & tokens.counted).sum().float(),
    }
