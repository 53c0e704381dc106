"""Lessons of a batch: what a training step learns from each rollout, before any minibatch is
cut."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engines.learn.advantages import all_equal, group_relative_advantages, overlong_punishments
from engines.learn.rollouts import Rollouts
from engines.learn.staleness import fresh_tokens
from schemas.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Lessons:
    """One entry for each rollout."""

    advantages: NDArray[np.float64]
    counted: list[NDArray[np.bool_]]
    """Whether each response token has a part in the loss and in its denominators."""
    metrics: dict[str, float]

    @property
    def trained(self) -> list[int]:
        """Rollouts with at least one such token."""
        return [sample for sample, counted in enumerate(self.counted) if counted.any()]


def read_lessons(
    rollouts: Rollouts,
    algorithm: AlgorithmConfig,
    *,
    policy_version: int,
    max_staleness: int,
    max_response_tokens: int,
) -> Lessons:
    """Advantages and masks of a batch that policy version `policy_version` is trained on.

    The overlong punishment is taken off all rewards of a group before its mean and deviation.
    Dynamic sampling looks at the rewards without it: DAPO compares accuracies.

    Raises:
        StalenessError: as `fresh_tokens`.
    """
    fresh = fresh_tokens(rollouts, policy_version, max_staleness)
    useful = [not (algorithm.dynamic_sampling and all_equal(g)) for g in rollouts.group_rewards]
    counted = [mask & use for mask, use in zip(fresh, useful, strict=True)]

    def punished(rewards: ArrayLike, num_tokens: ArrayLike) -> NDArray[np.float64]:
        return np.asarray(rewards) + overlong_punishments(
            num_tokens,
            max_tokens=max_response_tokens,
            buffer_tokens=algorithm.overlong_buffer_tokens,
            penalty=algorithm.overlong_penalty,
        )

    advantages = group_relative_advantages(
        punished(rollouts.rewards, [len(response) for response in rollouts.responses]),
        list(map(punished, rollouts.group_rewards, rollouts.group_lengths)),
        normalise_by_std=algorithm.normalise_by_std,
    )
    metrics = _staleness_metrics(rollouts, fresh, counted, policy_version)
    if algorithm.dynamic_sampling:
        metrics["actor/filtered_samples"] = 1.0 - float(np.mean(useful))
    return Lessons(advantages, counted, metrics)


def _staleness_metrics(
    rollouts: Rollouts,
    fresh: list[NDArray[np.bool_]],
    counted: list[NDArray[np.bool_]],
    policy_version: int,
) -> dict[str, float]:
    """`actor/staleness_mean` in policy versions over the tokens trained on, 0 without any;
    `actor/masked_tokens`: share of the batch's tokens that are too old."""
    ages = policy_version - np.concatenate(rollouts.versions)
    trained = ages[np.concatenate(counted)]
    return {
        "actor/staleness_mean": float(trained.mean()) if len(trained) else 0.0,
        "actor/masked_tokens": 1.0 - float(np.concatenate(fresh).mean()),
    }
