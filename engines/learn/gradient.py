"""The gradient of one minibatch, over micro-batches and trainer processes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from engines.learn.losses import (
    clipped_policy_losses,
    kl_penalties,
    policy_statistics,
    token_weights,
)
from engines.learn.packing import MicroBatch, TokenSequence, pack, plan_rows
from engines.learn.policy import Policy
from engines.learn.rollouts import Rollouts, share_by_tokens
from schemas.config import AlgorithmConfig

RATIO_MAX = "actor/ratio_max"
ROLLOUT_LOGPROB_DIFF = "actor/rollout_logprob_diff"
WEIGHTED = {"actor/pg_loss", "actor/kl_loss"}
"""Metrics whose tokens already carry the loss's weights."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised, and in pieces of which size."""

    algorithm: AlgorithmConfig
    temperature: float
    micro_batch_tokens: int


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The samples of one optimiser update, or of one rank's share in it; one entry each."""

    sequences: list[TokenSequence]
    old_logprobs: list[NDArray[np.float32]]
    """Of each response token, as the rollout engine recorded them."""
    advantages: list[float]

    @property
    def num_response_tokens(self) -> list[int]:
        return [len(logprobs) for logprobs in self.old_logprobs]

    @property
    def num_input_tokens(self) -> list[int]:
        return [sequence.num_input_tokens for sequence in self.sequences]

    def select(self, samples: Sequence[int]) -> "Minibatch":
        return Minibatch(
            sequences=[self.sequences[sample] for sample in samples],
            old_logprobs=[self.old_logprobs[sample] for sample in samples],
            advantages=[self.advantages[sample] for sample in samples],
        )


def make_minibatch(
    rollouts: Rollouts, advantages: NDArray[np.float64], samples: Sequence[int]
) -> Minibatch:
    """The named rollouts with their advantages; `advantages` has one entry per rollout."""
    return Minibatch(
        sequences=[
            TokenSequence(rollouts.token_ids(sample), len(rollouts.prompts[sample]))
            for sample in samples
        ],
        old_logprobs=[rollouts.inference_logprobs[sample] for sample in samples],
        advantages=[float(advantages[sample]) for sample in samples],
    )


def accumulate_gradient(
    policy: Policy,
    reference: Policy | None,
    minibatch: Minibatch,
    objective: Objective,
    *,
    rank: int,
    world_size: int,
) -> dict[str, float]:
    """Add the gradient of the whole minibatch's loss to the policy's gradients.

    Denominators are those of the whole minibatch, so neither the micro-batches nor the number of
    processes change the gradient (beyond the order of additions). All ranks plan all shares, so
    that each knows how many passes the busiest one makes: FSDP2 needs every rank in every pass.

    Returns:
        `actor/...` metrics of the whole minibatch, the same on every rank.
    """
    shares = share_by_tokens(minibatch.num_input_tokens, world_size)
    budget = objective.micro_batch_tokens
    num_passes = max(
        len(plan_rows(minibatch.select(share).num_input_tokens, budget)) for share in shares
    )
    mine = minibatch.select(shares[rank])
    weights = _weights(mine, minibatch, objective.algorithm)
    micro_batches = pack(mine.sequences, budget)
    measured = []
    for micro_batch in micro_batches:
        tokens = _gather_tokens(micro_batch, mine, weights, policy.device)
        loss, sums = _loss(policy, reference, micro_batch, tokens, objective)
        # FSDP2 averages gradients over ranks; the loss is a sum over them.
        (loss * world_size).backward()
        measured.append(sums)
    idle = pack(minibatch.sequences[:1], budget)[0]
    for _ in range(num_passes - len(micro_batches)):
        measured.append(_idle_pass(policy, reference, idle, objective))
    num_tokens = sum(minibatch.num_response_tokens)
    return _reduce(measured, num_tokens, world_size)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """One value per predicted token of a micro-batch, on the policy's device."""

    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor


def _weights(mine: Minibatch, minibatch: Minibatch, algorithm: AlgorithmConfig) -> list[NDArray[np.float32]]:
    """Of each sample's tokens in the loss."""
    weights = token_weights(
        mine.num_response_tokens,
        algorithm.loss_aggregation,
        total_tokens=sum(minibatch.num_response_tokens),
        total_sequences=len(minibatch.sequences),
    )
    return np.split(weights, np.cumsum(mine.num_response_tokens)[:-1])


def _gather_tokens(
    batch: MicroBatch, mine: Minibatch, weights: list[NDArray[np.float32]], device: torch.device
) -> _Tokens:
    old = [mine.old_logprobs[sample] for sample in batch.samples]
    advantages = np.repeat(
        np.asarray([mine.advantages[sample] for sample in batch.samples], np.float32),
        [len(logprobs) for logprobs in old],
    )
    return _Tokens(
        old_logprobs=torch.from_numpy(np.concatenate(old)).to(device),
        advantages=torch.from_numpy(advantages).to(device),
        weights=torch.from_numpy(np.concatenate([weights[at] for at in batch.samples])).to(device),
    )


def _loss(
    policy: Policy,
    reference: Policy | None,
    batch: MicroBatch,
    tokens: _Tokens,
    objective: Objective,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's part of the loss, and its part of the metrics."""
    algorithm = objective.algorithm
    clip = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    scores = policy.score(batch, objective.temperature)
    against = (scores.logprobs, tokens.old_logprobs, tokens.advantages)
    loss = (clipped_policy_losses(*against, **clip) * tokens.weights).sum()
    sums = {"actor/pg_loss": loss.detach()}
    if reference is not None:
        with torch.no_grad():
            reference_logprobs = reference.score(batch, objective.temperature).logprobs
        kl_loss = (kl_penalties(scores.logprobs, reference_logprobs) * tokens.weights).sum()
        sums["actor/kl_loss"] = kl_loss.detach()
        loss = loss + algorithm.kl_coefficient * kl_loss
    with torch.no_grad():
        sums["actor/entropy"] = scores.entropies.sum()
        sums |= policy_statistics(*against, **clip)
        sums[RATIO_MAX] = torch.exp(scores.logprobs - tokens.old_logprobs).max()
    return loss, sums


def _idle_pass(
    policy: Policy, reference: Policy | None, batch: MicroBatch, objective: Objective
) -> dict[str, Tensor]:
    """Take part in the collectives of a pass without adding to it."""
    nothing = torch.zeros(len(batch.targets), device=policy.device)
    loss, sums = _loss(policy, reference, batch, _Tokens(nothing, nothing, nothing), objective)
    loss.backward()
    return {name: torch.zeros_like(value) for name, value in sums.items()}


def _reduce(
    measured: list[dict[str, Tensor]], num_tokens: int, world_size: int
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
        metrics[name] /= num_tokens
    metrics[RATIO_MAX] = peaks[names.index(RATIO_MAX)].item()
    return metrics


def summarise(updates: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a training step from those of its minibatches: means, except where the name says
    otherwise, and `actor/rollout_logprob_diff`, which only the first can measure."""
    metrics = {name: float(np.mean([update[name] for update in updates])) for name in updates[0]}
    metrics[RATIO_MAX] = max(update[RATIO_MAX] for update in updates)
    metrics[ROLLOUT_LOGPROB_DIFF] = updates[0][ROLLOUT_LOGPROB_DIFF]
    metrics["actor/lr"] = updates[-1]["actor/lr"]
    return metrics
