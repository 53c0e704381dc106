"""The samples of one optimiser update, and each rank's share in them. No model is asked here."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.learn.lessons import Lessons
from engines.learn.losses import token_weights
from engines.learn.packing import TokenSequence, plan_rows
from engines.learn.rollouts import Rollouts, plan_minibatches, share_by_tokens
from schemas.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Loss to minimise, and the size of its pieces."""

    algorithm: AlgorithmConfig
    temperature: float
    micro_batch_tokens: int
    max_response_tokens: int


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The samples of one optimiser update, or of one rank's share in it; one entry each."""

    sequences: list[TokenSequence]
    inference_logprobs: list[NDArray[np.float32]]
    """Log-probability of each response token, as the rollout engine recorded it."""
    advantages: list[float]
    counted: list[NDArray[np.bool_]]
    """Whether each response token is trained on."""

    @property
    def num_input_tokens(self) -> list[int]:
        return [sequence.num_input_tokens for sequence in self.sequences]

    @property
    def num_counted(self) -> int:
        return sum(int(counted.sum()) for counted in self.counted)

    def select(self, samples: Sequence[int]) -> "Minibatch":
        return Minibatch(
            sequences=[self.sequences[sample] for sample in samples],
            inference_logprobs=[self.inference_logprobs[sample] for sample in samples],
            advantages=[self.advantages[sample] for sample in samples],
            counted=[self.counted[sample] for sample in samples],
        )


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a minibatch, and what it must know of the whole."""

    mine: Minibatch
    weights: list[NDArray[np.float32]]
    """Weight of each response token of `mine` in the loss."""
    num_passes: int
    """Forward passes of the rank that has most of them."""
    num_counted: int
    """Tokens of the whole minibatch that are trained on."""
    idle: TokenSequence
    """Sequence with which a rank that has done its own passes takes part in the others'."""
    old_logprobs: list[NDArray[np.float32]] | None = None
    """Log-probability of each response token of `mine` under the policy before the step, where that
    is neither the current one nor the engine's."""


def cut_minibatches(
    rollouts: Rollouts, lessons: Lessons, num_minibatches: int, seed: Sequence[int]
) -> list[Minibatch]:
    """The rollouts that are trained on; none are no minibatch. See `plan_minibatches`."""
    trained = lessons.trained
    groups = [rollouts.groups[sample] for sample in trained]
    shares = plan_minibatches(groups, num_minibatches, seed)
    return [make_minibatch(rollouts, lessons, [trained[at] for at in share]) for share in shares]


def make_minibatch(rollouts: Rollouts, lessons: Lessons, samples: Sequence[int]) -> Minibatch:
    """The named rollouts with what is learnt from them."""
    return Minibatch(
        sequences=[
            TokenSequence(rollouts.token_ids(sample), len(rollouts.prompts[sample]))
            for sample in samples
        ],
        inference_logprobs=[rollouts.inference_logprobs[sample] for sample in samples],
        advantages=[float(lessons.advantages[sample]) for sample in samples],
        counted=[lessons.counted[sample] for sample in samples],
    )


def deal(minibatch: Minibatch, settings: LossSettings, rank: int, world_size: int) -> Share:
    """Share of a minibatch that this rank computes.

    Denominators are those of the whole minibatch, so neither the micro-batches nor the number of
    processes change the gradient (beyond the order of additions). All ranks plan all shares, so
    that each knows how many passes the busiest one makes: FSDP2 needs every rank in every pass.
    """
    shares = share_by_tokens(minibatch.num_input_tokens, world_size)
    budget = settings.micro_batch_tokens
    mine = minibatch.select(shares[rank])
    num_counted = minibatch.num_counted
    return Share(
        mine=mine,
        weights=token_weights(
            mine.counted,
            settings.algorithm.loss_aggregation,
            total_tokens=num_counted,
            total_sequences=sum(bool(counted.any()) for counted in minibatch.counted),
            max_response_tokens=settings.max_response_tokens,
        ),
        num_passes=max(
            len(plan_rows(minibatch.select(share).num_input_tokens, budget)) for share in shares
        ),
        num_counted=num_counted,
        idle=minibatch.sequences[0],
    )
