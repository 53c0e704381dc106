"""The gradient of one minibatch, over micro-batches and trainer processes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from refrain.engines.balance import longest_first
from refrain.engines.learn.diagnostics import Sums, combine, nothing_like
from refrain.engines.learn.lora import without_adapters
from refrain.engines.learn.minibatch import Share
from refrain.engines.learn.objective import LossTokens, policy_loss
from refrain.engines.learn.objectives.distillation import taught_advantages
from refrain.engines.learn.objectives.kl import kl_penalties
from refrain.engines.learn.packing import MicroBatch, pack, plan_micro_batches
from refrain.engines.learn.policy import PolicyModel, score_sequences
from refrain.engines.learn.rollouts import ScoredRollout
from refrain.engines.learn.teacher.client import TeacherClient
from refrain.schemas.config import TrainConfig
from refrain.schemas.teacher import TeacherServerConfig


@dataclass(frozen=True, slots=True)
class Reference:
    """The policy before training, near which a KL penalty keeps the policy, or a teacher."""

    policy: PolicyModel
    own: bool
    """Whether this is a separate model; otherwise it is the trained model without its adapters."""

    def at_work(self) -> AbstractContextManager[None]:
        return nullcontext() if self.own else without_adapters(self.policy)

    @torch.no_grad()
    def score(self, batch: MicroBatch, temperature: float) -> Tensor:
        """Return the log-probabilities of the batch's tokens, float32 [tokens]."""
        with self.at_work():
            return self.policy.score(batch, temperature).logprobs


def with_old_logprobs(
    policy: PolicyModel, shares: Sequence[Share], config: TrainConfig
) -> list[Share]:
    """Return a step's shares with the old policy's log-probabilities, where an earlier update of
    the step changes the policy before they are needed. The first update needs no forward pass for
    them: its policy is the old one."""
    num_current = 1 if config.trainer.passes_per_step == 1 else 0
    later = [with_logprobs(policy, share, config) for share in shares[num_current:]]
    return [*shares[:num_current], *later]


def with_teacher_logprobs(config: TeacherServerConfig | None, shares: list[Share]) -> list[Share]:
    """Return a rank's shares with the log-probabilities that its teacher's servers give, all asked
    for at once. Without servers, return the shares as they are. Raise TeacherError as
    `TeacherClient.score` does."""
    if config is None:
        return shares
    scored = iter(TeacherClient(config).score([one for own in shares for one in own.sequences]))
    return [replace(own, teacher_logprobs=list(islice(scored, len(own.samples)))) for own in shares]


def with_logprobs(policy: PolicyModel, share: Share, config: TrainConfig) -> Share:
    """Return the share with the current policy's log-probabilities of its tokens.

    Collective: every rank makes as many passes as the busiest one.
    """
    budget, temperature = config.trainer.row_tokens, config.rollout.temperature
    values = score_sequences(policy, share.sequences, budget, temperature)
    for _ in range(share.num_idle_passes):
        score_sequences(policy, [share.idle], budget, temperature)
    return replace(share, old_logprobs=values)


def reference_kl(
    reference: Reference | None,
    rollouts: Sequence[ScoredRollout],
    config: TrainConfig,
    rank: int,
    world_size: int,
) -> list[float] | None:
    """Return of each rollout the sum of log pi_inference - log pi_ref over its sampled tokens, or
    None if no reward needs it.

    Collective: each rank scores its share, and makes as many passes as the busiest one. Ranks that
    share rows count as one in `rank` and `world_size`.
    """
    if reference is None or config.algorithm.reward_kl_coefficient == 0.0:
        return None
    policy, budget = reference.policy, config.trainer.row_tokens
    temperature = config.rollout.temperature
    shares = longest_first(
        range(len(rollouts)), lambda at: rollouts[at].num_input_tokens, world_size
    )
    sizes = [[rollouts[at].num_input_tokens for at in share] for share in shares]
    num_passes = [len(plan_micro_batches(own, budget, alone=policy.alone)) for own in sizes]
    sums = torch.zeros(len(rollouts), dtype=torch.float64)
    with reference.at_work():
        own = [rollouts[at] for at in shares[rank]]
        scored = score_sequences(policy, own, budget, temperature)
        for _ in range(max(num_passes) - num_passes[rank]):
            score_sequences(policy, rollouts[:1], budget, temperature)
    for at, logprobs in zip(shares[rank], scored, strict=True):
        differences = rollouts[at].inference_logprobs - logprobs
        sums[at] = float(differences.sum(dtype=np.float64))
    if world_size > 1:
        sums = sums.to(policy.device)
        dist.all_reduce(sums)
        sums /= config.trainer.context_parallel  # Ranks that share rows have the same sums.
    return sums.tolist()


def accumulate_gradient(
    policy: PolicyModel,
    reference: Reference | None,
    share: Share,
    config: TrainConfig,
    world_size: int,
) -> dict[str, float]:
    """Add the gradient of the whole minibatch's loss to the policy's gradients.

    Returns `actor/...` metrics of the whole minibatch, the same on every rank. Means are over its
    trained tokens. `world_size`: all ranks, also those that share rows.
    """
    budget = config.trainer.row_tokens
    measured = []
    micro_batches = pack(share.sequences, budget, alone=policy.alone)
    for micro_batch in micro_batches:
        tokens = LossTokens.gather(micro_batch.samples, share, policy.device)
        loss, sums = _loss(policy, reference, micro_batch, tokens, config)
        # FSDP2 averages gradients over ranks, but the loss is a sum over ranks. Ranks that share a
        # row have the same loss, and each has the gradient of its own tokens.
        (loss * world_size).backward()
        measured.append(sums)
    (idle,) = pack([share.idle], budget)
    for _ in range(share.num_idle_passes):
        measured.append(_idle_pass(policy, reference, idle, share, config))
    return combine(measured, share.num_counted, world_size, config.trainer.context_parallel)


def _loss(
    policy: PolicyModel,
    reference: Reference | None,
    batch: MicroBatch,
    tokens: LossTokens,
    config: TrainConfig,
) -> tuple[Tensor, Sums]:
    """Return this micro-batch's part of the loss and of the metrics."""
    algorithm, temperature = config.algorithm, config.rollout.temperature
    with_entropy = algorithm.entropy_coefficient > 0.0
    scores = policy.score(batch, temperature, entropy_gradient=with_entropy)
    scored = None
    if reference is not None and algorithm.scores_tokens:
        scored = reference.score(batch, temperature)
    taught: Sums = {}
    teacher = scored if algorithm.teacher else tokens.teacher_logprobs
    if teacher is not None:
        advantages, taught["actor/teacher_kl"] = taught_advantages(
            tokens.advantages,
            tokens.inference_logprobs,
            teacher,
            tokens.counted,
            algorithm.reward_weight,
        )
        tokens = replace(tokens, advantages=advantages)
    loss, sums = policy_loss(scores.logprobs, tokens, algorithm)
    sums |= taught
    if scored is not None and algorithm.kl_coefficient > 0.0:
        penalties = kl_penalties(scores.logprobs, scored, algorithm.kl_estimator)
        kl_loss = (penalties * tokens.weights).sum()
        sums["actor/kl_loss"] = kl_loss.detach()
        loss = loss + algorithm.kl_coefficient * kl_loss
    if with_entropy:
        bonus = (scores.entropies * tokens.weights).sum()
        loss = loss - algorithm.entropy_coefficient * bonus
    sums["actor/entropy"] = (scores.entropies.detach() * tokens.counted).sum()
    return loss, sums


def _idle_pass(
    policy: PolicyModel,
    reference: Reference | None,
    batch: MicroBatch,
    share: Share,
    config: TrainConfig,
) -> Sums:
    """Take part in the collectives of a pass, with a gradient of zero."""
    nothing = LossTokens.none(len(batch.targets), share, policy.device)
    loss, sums = _loss(policy, reference, batch, nothing, config)
    loss.backward()
    return nothing_like(sums)


def clip_gradient(policy: PolicyModel, max_norm: float) -> float:
    """Clip the policy's gradient. Return its norm before."""
    norm = clip_grad_norm_(policy.parameters(), max_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
