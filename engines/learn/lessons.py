"""Lessons of a batch: what a training step learns from each rollout, before any minibatch is cut.

A step of policy version v trains tokens of versions v - max_staleness to v. A sample that was
deferred from an earlier step may begin with older tokens: those are masked, the rest is trained.
Anywhere else an older token, and a newer one everywhere, is an error of whoever made the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engines.learn.advantages import all_equal, group_relative_advantage, overlong_punishments
from engines.learn.rollouts import ScoredRollout
from schemas.config import TrainConfig


class StalenessError(ValueError):
    """A batch holds tokens of a policy version that it must not hold."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Part of one rollout in a training step."""

    rollout: ScoredRollout
    advantage: float
    counted: NDArray[np.bool_]
    """Whether each response token has a part in the loss and in its denominators."""


def read_lessons(
    rollouts: Sequence[ScoredRollout], config: TrainConfig, policy_version: int
) -> tuple[list[Lesson], dict[str, float]]:
    """Advantages and masks of a batch that policy version `policy_version` is trained on, with
    `actor/...` metrics of the whole batch.

    Dynamic sampling looks at the rewards without the overlong punishment: DAPO compares
    accuracies. Raises StalenessError as `fresh_tokens` does.
    """
    dynamic = config.algorithm.dynamic_sampling
    fresh = [fresh_tokens(rollout, policy_version, config.max_staleness) for rollout in rollouts]
    useful = [not (dynamic and all_equal(rollout.group_rewards)) for rollout in rollouts]
    lessons = [
        Lesson(rollout, _advantage(rollout, config), mask & use)
        for rollout, mask, use in zip(rollouts, fresh, useful, strict=True)
    ]
    metrics = _staleness_metrics(lessons, fresh, policy_version)
    if dynamic:
        metrics["actor/filtered_samples"] = 1.0 - float(np.mean(useful))
    return lessons, metrics


def fresh_tokens(
    rollout: ScoredRollout, policy_version: int, max_staleness: int
) -> NDArray[np.bool_]:
    """Whether each response token's version is at least `policy_version - max_staleness`.

    Raises StalenessError when a token is of a later version than `policy_version`, or is too old
    though the sample was not deferred.
    """
    versions, oldest = rollout.versions, policy_version - max_staleness
    deferred = rollout.origin_step <= policy_version
    if versions.max() > policy_version or (versions.min() < oldest and not deferred):
        raise StalenessError(
            f"sample {rollout.sample_index} of prompt {rollout.prompt_key}, planned for step "
            f"{rollout.origin_step}, has tokens of policy versions {versions.min()} to "
            f"{versions.max()}; policy version {policy_version} is trained on versions {oldest} to "
            f"{policy_version}, and on older ones only in samples deferred from before step "
            f"{policy_version + 1}: resume the run from its last checkpoint, which removes what "
            "does not belong to it"
        )
    return versions >= oldest


def _advantage(rollout: ScoredRollout, config: TrainConfig) -> float:
    """The overlong punishment is taken off all rewards of a group before its mean and deviation."""
    algorithm = config.algorithm

    def punished(reward: ArrayLike, num_tokens: ArrayLike) -> NDArray[np.float64]:
        return np.asarray(reward) + overlong_punishments(
            num_tokens,
            max_tokens=config.data.max_response_tokens,
            buffer_tokens=algorithm.overlong_buffer_tokens,
            penalty=algorithm.overlong_penalty,
        )

    return group_relative_advantage(
        float(punished(rollout.reward, rollout.num_response_tokens)),
        punished(rollout.group_rewards, rollout.group_lengths),
        normalise_by_std=algorithm.normalise_by_std,
    )


def _staleness_metrics(
    lessons: Sequence[Lesson], fresh: Sequence[NDArray[np.bool_]], policy_version: int
) -> dict[str, float]:
    """`actor/staleness_mean` in policy versions over the tokens trained on, 0 without any;
    `actor/masked_tokens`: share of the batch's tokens that are too old."""
    ages = policy_version - np.concatenate([lesson.rollout.versions for lesson in lessons])
    trained = ages[np.concatenate([lesson.counted for lesson in lessons])]
    return {
        "actor/staleness_mean": float(trained.mean()) if len(trained) else 0.0,
        "actor/masked_tokens": 1.0 - float(np.concatenate(fresh).mean()),
    }
