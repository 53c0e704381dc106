"""Lessons of a batch: what a training step learns from each rollout, before any minibatch is cut.

A step of policy version v trains tokens of versions v - max_staleness to v. A sample that was
deferred from the step before may begin with tokens one version older, which its own step would have
trained; all of it is trained. An older token, and a newer one, is an error of whoever made the
batch. Every token's own log-probability is that of the version which generated it, so its ratio to
the policy that is trained is right at any age.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engines.learn.advantages import (
    all_equal,
    group_relative_advantage,
    overlong_punishments,
    whitened,
)
from engines.learn.own_functions import own_functions
from engines.learn.rollouts import ScoredRollout
from schemas.config import TrainConfig

MAX_DEFERRALS = 1
"""Steps that a sample may be deferred by (`schemas.rollout.RolloutRequest.deferred`)."""


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
    accuracies. A truncated response that is filtered stays in its group's mean and deviation: what
    it was worth is known, its loss alone is left out. Raises StalenessError as `check_versions`
    does.
    """
    algorithm = config.algorithm
    for rollout in rollouts:
        check_versions(rollout, policy_version, config.max_staleness)
    varied = [not all_equal(rollout.group_rewards) for rollout in rollouts]
    masked = [algorithm.overlong_filtering and rollout.truncated for rollout in rollouts]
    taught = [
        not mask and (differs or not algorithm.dynamic_sampling)
        for differs, mask in zip(varied, masked, strict=True)
    ]
    num_tokens = [rollout.num_response_tokens for rollout in rollouts]
    rewards = [_punished(rollout, config) for rollout in rollouts]
    advantages = _advantages(rewards, np.where(taught, num_tokens, 0), config)
    lessons = list(map(Lesson, rollouts, advantages, map(np.full, num_tokens, taught)))
    metrics = {"actor/staleness_mean": _mean_staleness(lessons, policy_version)}
    metrics |= _reward_metrics(lessons, [reward for reward, _ in rewards])
    if algorithm.dynamic_sampling:
        metrics["actor/filtered_samples"] = 1.0 - float(np.mean(varied))
    if algorithm.overlong_filtering:
        metrics["actor/overlong_samples"] = float(np.mean(masked))
    return lessons, metrics


def check_versions(rollout: ScoredRollout, policy_version: int, max_staleness: int) -> None:
    """Raises StalenessError when a token is of a later version than `policy_version`, or older than
    the step that drew the sample admits: this one, or for a deferred sample the one before."""
    versions, num_deferrals = rollout.versions, policy_version + 1 - rollout.origin_step
    oldest = policy_version - max_staleness - num_deferrals
    known = 0 <= num_deferrals <= MAX_DEFERRALS
    if not known or versions.min() < oldest or versions.max() > policy_version:
        raise StalenessError(
            f"sample {rollout.sample_index} of prompt {rollout.prompt_key}, planned for step "
            f"{rollout.origin_step}, has tokens of policy versions {versions.min()} to "
            f"{versions.max()}; policy version {policy_version} is trained on versions "
            f"{policy_version - max_staleness} to {policy_version}, and on one more in samples "
            f"deferred from step {policy_version}: resume the run from its last checkpoint, which "
            "removes what does not belong to it"
        )


def _punished(rollout: ScoredRollout, config: TrainConfig) -> tuple[float, NDArray[np.float64]]:
    """Rewards of a response and of its group, each less the punishment for its length."""
    algorithm = config.algorithm

    def punished(reward: ArrayLike, num_tokens: ArrayLike) -> NDArray[np.float64]:
        return np.asarray(reward) + overlong_punishments(
            num_tokens,
            max_tokens=config.data.max_response_tokens,
            buffer_tokens=algorithm.overlong_buffer_tokens,
            penalty=algorithm.overlong_penalty,
        )

    own = float(punished(rollout.reward, rollout.num_response_tokens))
    return own, punished(rollout.group_rewards, rollout.group_lengths)


def _advantages(
    rewards: Sequence[tuple[float, NDArray[np.float64]]],
    num_tokens_N: NDArray[np.int64],
    config: TrainConfig,
) -> list[float]:
    """Advantages of responses from their rewards and their groups'; `num_tokens_N`: tokens of each
    that are trained on."""
    algorithm = config.algorithm
    advantages = [_advantage(*own, config) for own in rewards]
    if algorithm.normalise_by_std and algorithm.std_over == "batch":
        return whitened(np.array(advantages), num_tokens_N).tolist()
    return advantages


def _advantage(reward: float, rewards_G: NDArray[np.float64], config: TrainConfig) -> float:
    """The advantage of a response, before anything that concerns the whole batch."""
    algorithm = config.algorithm
    own = own_functions(algorithm.file)
    if own.advantage is not None:
        return own.advantage_of(reward, rewards_G)
    by_group = algorithm.normalise_by_std and algorithm.std_over == "group"
    return group_relative_advantage(
        reward, rewards_G, normalise_by_std=by_group, baseline=algorithm.baseline
    )


def _reward_metrics(lessons: Sequence[Lesson], rewards: Sequence[float]) -> dict[str, float]:
    """`critic/rewards/*`: over responses, less the punishment for length; `critic/advantages/*`:
    over the tokens trained on, 0 without any; `critic/zero_variance_share`: groups whose scores
    are all equal."""
    groups = {lesson.rollout.group: all_equal(lesson.rollout.group_rewards) for lesson in lessons}
    per_token = [np.full(lesson.counted.sum(), lesson.advantage) for lesson in lessons]
    advantages = np.concatenate(per_token)
    return {
        **_spread("critic/rewards", np.array(rewards)),
        **_spread("critic/advantages", advantages if len(advantages) else np.zeros(1)),
        "critic/zero_variance_share": float(np.mean(list(groups.values()))),
    }


def _spread(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    figures = {"mean": np.mean, "max": np.max, "min": np.min, "std": np.std}
    return {f"{name}/{figure}": float(of(values)) for figure, of in figures.items()}


def _mean_staleness(lessons: Sequence[Lesson], policy_version: int) -> float:
    """Age of the tokens trained on, in policy versions; 0 without any."""
    ages = policy_version - np.concatenate([lesson.rollout.versions for lesson in lessons])
    trained = ages[np.concatenate([lesson.counted for lesson in lessons])]
    return float(trained.mean()) if len(trained) else 0.0
