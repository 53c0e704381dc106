"""Split samples into minibatches, one for each optimiser update, and each minibatch over the
ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refrain.engines.balance import longest_first
from refrain.engines.learn.objectives.aggregation import token_weights
from refrain.engines.learn.packing import TokenSequence, plan_micro_batches
from refrain.engines.learn.training_samples import MAX_DEFERRALS, TrainingSample
from refrain.schemas.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a minibatch, and the totals of the whole minibatch that it needs."""

    samples: list[TrainingSample]
    weights: list[NDArray[np.float32]]
    """Weight in the loss of each sampled token of `samples`."""
    num_counted: int
    """Trained tokens of the whole minibatch."""
    num_idle_passes: int
    """How many more forward passes the busiest rank makes than this rank."""
    idle: TokenSequence
    """Sequence that this rank scores in those passes."""
    max_staleness: int
    """Largest staleness of a trained token, in policy versions."""
    old_logprobs: list[NDArray[np.float32]] | None = None
    """Log-probability of each sampled token of `samples` under the policy before the step; None if
    the current policy or the engine's serves instead."""
    teacher_logprobs: list[NDArray[np.float32]] | None = None
    """Log-probability of each sampled token of `samples` under a teacher on a server; None without
    one."""

    @property
    def sequences(self) -> list[TokenSequence]:
        return [sample.rollout for sample in self.samples]


def cut_minibatches(
    samples: Sequence[TrainingSample], num_minibatches: int, seed: Sequence[int]
) -> list[list[TrainingSample]]:
    """Split the samples that have trained tokens into minibatches (`plan_minibatches`)."""
    trained = [sample for sample in samples if sample.counted.any()]
    groups = [sample.rollout.group for sample in trained]
    shares = plan_minibatches(groups, num_minibatches, seed)
    return [[trained[at] for at in share] for share in shares]


def plan_minibatches(
    groups: Sequence[tuple[int, str]], num_minibatches: int, seed: Sequence[int]
) -> list[list[int]]:
    """Shuffle whole groups by the seed into disjoint minibatches that contain every sample once.

    `groups`: the group of each sample. If there are fewer groups than minibatches, return fewer.
    """
    members: dict[tuple[int, str], list[int]] = {}
    for sample, group in enumerate(groups):
        members.setdefault(group, []).append(sample)
    keys = sorted(members)
    order = np.random.default_rng(seed).permutation(len(keys))
    shares = [order[start::num_minibatches] for start in range(min(num_minibatches, len(keys)))]
    return [[sample for at in share for sample in members[keys[at]]] for share in shares]


def assign_share(
    minibatch: Sequence[TrainingSample],
    config: TrainConfig,
    rank: int,
    world_size: int,
    *,
    alone: bool = False,
) -> Share:
    """Return this rank's share of a minibatch. Each sample must have a counted token. `alone`: the
    policy needs a row for each sample. Ranks that share rows count as one (`Learner`).

    Denominators are those of the whole minibatch. So neither micro-batches nor the number of
    processes change the gradient, except for the order of additions. Every rank plans all shares to
    learn how many passes the busiest one makes: FSDP2 needs every rank in every pass.
    """
    shares = longest_first(minibatch, _num_input_tokens, world_size)
    budget = config.trainer.row_tokens
    num_passes = [
        len(plan_micro_batches(list(map(_num_input_tokens, own)), budget, alone=alone))
        for own in shares
    ]
    num_counted = sum(int(sample.counted.sum()) for sample in minibatch)
    return Share(
        samples=shares[rank],
        weights=token_weights(
            [sample.counted for sample in shares[rank]],
            config.algorithm.loss_aggregation,
            total_tokens=num_counted,
            total_sequences=len(minibatch),
            max_response_tokens=config.data.max_response_tokens,
        ),
        num_counted=num_counted,
        num_idle_passes=max(num_passes) - num_passes[rank],
        idle=minibatch[0].rollout,
        max_staleness=config.staleness and config.staleness + MAX_DEFERRALS,
    )


def _num_input_tokens(sample: TrainingSample) -> int:
    return sample.rollout.num_input_tokens
