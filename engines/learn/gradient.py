"""The gradient of one minibatch, over micro-batches and trainer processes."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from engines.learn.lora import without_adapters
from engines.learn.losses import (
    clipped_policy_losses,
    kl_penalties,
    policy_statistics,
    sequence_log_ratios,
    truncated_weights,
)
from engines.learn.minibatch import Share
from engines.learn.packing import MicroBatch, pack
from engines.learn.policy import PolicyModel, score_sequences
from engines.learn.sharding import keep_gathered
from schemas.config import TrainConfig

RATIO_MAX = "actor/ratio_max"
ROLLOUT_LOGPROB_DIFF = "actor/rollout_logprob_diff"
WEIGHTED = {"actor/pg_loss", "actor/kl_loss"}
"""Metrics whose tokens already carry the loss's weights."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The policy before training, that a penalty holds the policy near to."""

    policy: PolicyModel
    own: bool
    """Whether it is a model of its own; otherwise the trained one without its adapters."""

    def at_work(self) -> AbstractContextManager[None]:
        return nullcontext() if self.own else without_adapters(self.policy)


def with_old_logprobs(policy: PolicyModel, share: Share, config: TrainConfig) -> Share:
    """The share with the log-probabilities that the current policy gives to its tokens.

    Collective: every rank makes the passes of the busiest one.
    """
    budget, temperature = config.trainer.micro_batch_tokens, config.rollout.temperature
    values = score_sequences(policy, share.sequences, budget, temperature)
    for _ in range(share.num_idle_passes):
        score_sequences(policy, [share.idle], budget, temperature)
    return replace(share, old_logprobs=values)


def accumulate_gradient(
    policy: PolicyModel,
    reference: Reference | None,
    share: Share,
    config: TrainConfig,
    world_size: int,
) -> dict[str, float]:
    """Add the gradient of the whole minibatch's loss to the policy's gradients.

    Returns `actor/...` metrics of the whole minibatch, the same on every rank; means are over its
    tokens that are trained on.
    """
    budget = config.trainer.micro_batch_tokens
    measured = []
    micro_batches = pack(share.sequences, budget, alone=policy.alone)
    num_passes = len(micro_batches) + share.num_idle_passes
    for index, micro_batch in enumerate(micro_batches):
        keep_gathered(policy, not config.trainer.reshard and index < num_passes - 1)
        tokens = _gather_tokens(micro_batch, share, policy.device)
        loss, sums = _loss(policy, reference, micro_batch, tokens, config)
        # FSDP2 averages gradients over ranks; the loss is a sum over them.
        (loss * world_size).backward()
        measured.append(sums)
    (idle,) = pack([share.idle], budget)
    for index in range(len(micro_batches), num_passes):
        keep_gathered(policy, not config.trainer.reshard and index < num_passes - 1)
        measured.append(_idle_pass(policy, reference, idle, config))
    return _reduce(measured, share.num_counted, world_size)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """One value per predicted token of a micro-batch, on the policy's device."""

    num_tokens: list[int]
    """Response tokens of each sample, one after another."""
    inference_logprobs: Float[Tensor, "tokens"]
    old_logprobs: Float[Tensor, "tokens"] | None
    advantages: Float[Tensor, "tokens"]
    weights: Float[Tensor, "tokens"]
    counted: Bool[Tensor, "tokens"]


def _gather_tokens(batch: MicroBatch, share: Share, device: torch.device) -> _Tokens:
    lessons = [share.lessons[at] for at in batch.samples]
    num_tokens = [lesson.rollout.num_response_tokens for lesson in lessons]
    advantages = np.array([lesson.advantage for lesson in lessons], np.float32)

    def gather(values: list[NDArray]) -> Tensor:
        return torch.from_numpy(np.concatenate(values)).to(device)

    def gather_own(values: list[NDArray]) -> Tensor:
        return gather([values[at] for at in batch.samples])

    return _Tokens(
        num_tokens=num_tokens,
        inference_logprobs=gather([lesson.rollout.inference_logprobs for lesson in lessons]),
        old_logprobs=None if share.old_logprobs is None else gather_own(share.old_logprobs),
        advantages=torch.from_numpy(np.repeat(advantages, num_tokens)).to(device),
        weights=gather_own(share.weights),
        counted=gather([lesson.counted for lesson in lessons]),
    )


def _loss(
    policy: PolicyModel,
    reference: Reference | None,
    batch: MicroBatch,
    tokens: _Tokens,
    config: TrainConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's part of the loss, and its part of the metrics."""
    scores = policy.score(batch, config.rollout.temperature)
    loss, sums = _policy_loss(scores.logprobs, tokens, config)
    if reference is not None:
        with torch.no_grad(), reference.at_work():
            scored = reference.policy.score(batch, config.rollout.temperature)
        reference_logprobs = scored.logprobs
        kl_loss = (kl_penalties(scores.logprobs, reference_logprobs) * tokens.weights).sum()
        sums["actor/kl_loss"] = kl_loss.detach()
        loss = loss + config.algorithm.kl_coefficient * kl_loss
    sums["actor/entropy"] = (scores.entropies * tokens.counted).sum()
    return loss, sums


def _policy_loss(
    logprobs: Float[Tensor, "tokens"], tokens: _Tokens, config: TrainConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped loss, weighted where another policy than the old one generated the tokens."""
    algorithm = config.algorithm
    clip = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    old_logprobs = tokens.inference_logprobs
    if algorithm.tis_cap is not None:
        old_logprobs = logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    # Zero before any exponential: an infinite ratio times a weight of 0 would not be a number.
    log_ratios = torch.where(tokens.counted, logprobs - old_logprobs, 0.0)
    if algorithm.importance_ratio == "sequence":
        log_ratios = sequence_log_ratios(log_ratios, tokens.counted, tokens.num_tokens)
    losses = clipped_policy_losses(log_ratios, tokens.advantages, **clip)
    sums = {}
    if algorithm.tis_cap is not None:
        correction, truncated = truncated_weights(
            old_logprobs, tokens.inference_logprobs, algorithm.tis_cap
        )
        losses = losses * correction
        sums["actor/tis_mean"] = (correction * tokens.counted).sum()
        sums["actor/tis_truncated"] = (truncated & tokens.counted).sum().float()
    loss = (losses * tokens.weights).sum()
    sums["actor/pg_loss"] = loss.detach()
    with torch.no_grad():
        sums |= policy_statistics(log_ratios, tokens.advantages, tokens.counted, **clip)
        sums[RATIO_MAX] = (torch.exp(log_ratios) * tokens.counted).max()
        difference = (logprobs - tokens.inference_logprobs).abs()
        sums[ROLLOUT_LOGPROB_DIFF] = (difference * tokens.counted).sum()
    return loss, sums


def _idle_pass(
    policy: PolicyModel, reference: Reference | None, batch: MicroBatch, config: TrainConfig
) -> dict[str, Tensor]:
    """Take part in the collectives of a pass without adding to it."""
    num_tokens = len(batch.targets)
    zeros = torch.zeros(num_tokens, device=policy.device)
    nothing = _Tokens([num_tokens], zeros, zeros, zeros, zeros, zeros.bool())
    loss, sums = _loss(policy, reference, batch, nothing, config)
    loss.backward()
    return {name: torch.zeros_like(value) for name, value in sums.items()}


def _reduce(
    measured: list[dict[str, Tensor]], num_counted: int, world_size: int
) -> dict[str, float]:
    """Metrics of the minibatch from those of the passes of all ranks."""
    names = list(measured[0])
    passes = torch.stack([torch.stack([sums[name] for name in names]) for sums in measured])
    totals, peaks = passes.sum(0), passes.amax(0)
    if world_size > 1:
        dist.all_reduce(totals)
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
    metrics = dict(zip(names, totals.tolist(), strict=True))
    for name in metrics.keys() - WEIGHTED:
        metrics[name] /= num_counted
    metrics[RATIO_MAX] = peaks[names.index(RATIO_MAX)].item()
    return metrics


def summarise(updates: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a training step from those of its minibatches: means, except where the name says
    otherwise, and `actor/rollout_logprob_diff`, which only the first can measure."""
    if not updates:
        return {}
    metrics = {name: float(np.mean([update[name] for update in updates])) for name in updates[0]}
    metrics[RATIO_MAX] = max(update[RATIO_MAX] for update in updates)
    metrics[ROLLOUT_LOGPROB_DIFF] = updates[0][ROLLOUT_LOGPROB_DIFF]
    metrics["actor/lr"] = updates[-1]["actor/lr"]
    return metrics
