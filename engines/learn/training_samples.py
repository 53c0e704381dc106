"""Training samples of a batch: what a training step learns from each rollout.

A step at policy version v trains on tokens of versions v - max_staleness to v. A sample deferred
from the previous step may begin with tokens one version older, which that step would have accepted;
all its tokens are trained on. Any other version is an error of the code that made the batch. Each
token keeps the log-probability from the version that generated it, so its ratio to the trained
policy is right at any age.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from refrain.engines.learn.advantages import (
    all_equal,
    group_relative_advantage,
    overlong_punishments,
    whitened,
)
from refrain.engines.learn.objectives.maxrl import maxrl_advantage
from refrain.engines.learn.objectives.opo import opo_advantage
from refrain.engines.learn.objectives.reward_kl import kl_rewards
from refrain.engines.learn.own_functions import own_functions
from refrain.engines.learn.rollouts import ScoredRollout
from refrain.schemas.config import TrainConfig

MAX_DEFERRALS = 1
"""Number of steps by which a sample may be deferred (`schemas.rollout.RolloutRequest.deferred`)."""


class StalenessError(ValueError):
    """A batch contains tokens of a policy version that is not allowed."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """What a training step learns from one rollout."""

    rollout: ScoredRollout
    advantage: float
    counted: NDArray[np.bool_]
    """Whether each sampled token counts in the loss and its denominators."""
    staleness: NDArray[np.int32]
    """Policy versions between each sampled token and the trained policy."""


def read_training_samples(
    rollouts: Sequence[ScoredRollout],
    config: TrainConfig,
    policy_version: int,
    kl_N: Sequence[float] | None = None,
) -> tuple[list[TrainingSample], dict[str, float]]:
    """Return the samples of a batch for policy version `policy_version`, with their advantages and
    masks, and metrics of the whole batch. Rollouts that are left out give neither. `kl_N`: of each
    rollout the sum of log pi_inference - log pi_ref, for `reward_kl_coefficient`.

    Dynamic sampling compares rewards before the overlong punishment, because DAPO compares
    accuracies. A filtered truncated response still counts in its group's mean and deviation; only
    its loss is left out. Raises StalenessError as `check_versions` does.
    """
    algorithm = config.algorithm
    for rollout in rollouts:
        check_versions(rollout, policy_version, config.staleness)
    kept = [at for at, rollout in enumerate(rollouts) if not rollout.left_out]
    rollouts = [rollouts[at] for at in kept]
    if not rollouts:
        return [], {}
    varied = [not all_equal(rollout.group_rewards) for rollout in rollouts]
    masked = [algorithm.overlong_filtering and rollout.truncated for rollout in rollouts]
    taught = [
        not mask and (differs or not algorithm.dynamic_sampling)
        for differs, mask in zip(varied, masked, strict=True)
    ]
    num_tokens = [rollout.num_response_tokens for rollout in rollouts]
    rewards = [_punished(rollout, config) for rollout in rollouts]
    metrics = {}
    if kl_N is not None:
        kl = [kl_N[at] for at in kept]
        own, groups = [reward for reward, _ in rewards], [rollout.group for rollout in rollouts]
        rewards = kl_rewards(own, kl, groups, algorithm.reward_kl_coefficient)
        metrics["actor/reward_kl_penalty"] = sum(kl) / sum(num_tokens)
    advantages = _advantages(rollouts, rewards, np.where(taught, num_tokens, 0), config)
    counted = map(np.full, num_tokens, taught)
    staleness = [policy_version - rollout.versions for rollout in rollouts]
    samples = list(map(TrainingSample, rollouts, advantages, counted, staleness))
    metrics["actor/staleness_mean"] = _mean_staleness(samples)
    metrics |= _reward_metrics(samples, [reward for reward, _ in rewards])
    if algorithm.dynamic_sampling:
        metrics["actor/filtered_samples"] = 1.0 - float(np.mean(varied))
    if algorithm.overlong_filtering:
        metrics["actor/overlong_samples"] = float(np.mean(masked))
    return samples, metrics


def check_versions(rollout: ScoredRollout, policy_version: int, max_staleness: int) -> None:
    """Raise StalenessError when a token is newer than `policy_version`, or too old for the step
    that planned the sample: this step, or the previous one for a deferred sample."""
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
            "removes such samples"
        )


def _punished(rollout: ScoredRollout, config: TrainConfig) -> tuple[float, NDArray[np.float64]]:
    """Return the rewards of a response and of its group, after the punishment for length."""
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
    rollouts: Sequence[ScoredRollout],
    rewards: Sequence[tuple[float, NDArray[np.float64]]],
    num_tokens_N: NDArray[np.int64],
    config: TrainConfig,
) -> list[float]:
    """Return the responses' advantages from their own and their groups' rewards. `num_tokens_N`:
    number of tokens of each response that are trained on."""
    algorithm = config.algorithm
    pairs = zip(rollouts, rewards, strict=True)
    advantages = [_advantage(*own, rollout.group_lengths, config) for rollout, own in pairs]
    if algorithm.scale_rewards == "batch":
        return whitened(np.array(advantages), num_tokens_N).tolist()
    return advantages


def _advantage(
    reward: float,
    rewards_G: NDArray[np.float64],
    lengths_G: NDArray[np.int32],
    config: TrainConfig,
) -> float:
    """Return the advantage of a response before any normalisation over the batch."""
    algorithm = config.algorithm
    own = own_functions(algorithm.file)
    if own.advantage is not None:
        return own.advantage_of(reward, rewards_G)
    if algorithm.scale_rewards == "mean":
        return maxrl_advantage(reward, rewards_G)
    if algorithm.baseline == "length_weighted":
        return opo_advantage(reward, rewards_G, lengths_G)
    by_group = algorithm.scale_rewards == "group"
    return group_relative_advantage(
        reward, rewards_G, normalise_by_std=by_group, baseline=algorithm.baseline
    )


def _reward_metrics(
    samples: Sequence[TrainingSample], rewards: Sequence[float]
) -> dict[str, float]:
    """Return metrics of rewards and advantages. `critic/rewards/*` covers responses, after the
    punishment for length. `critic/advantages/*` covers trained tokens and is 0 without any.
    `critic/zero_variance_share` is the share of groups whose scores are all equal."""
    groups = {sample.rollout.group: all_equal(sample.rollout.group_rewards) for sample in samples}
    per_token = [np.full(sample.counted.sum(), sample.advantage) for sample in samples]
    advantages = np.concatenate(per_token)
    return {
        **_spread("critic/rewards", np.array(rewards)),
        **_spread("critic/advantages", advantages if len(advantages) else np.zeros(1)),
        "critic/zero_variance_share": float(np.mean(list(groups.values()))),
    }


def _spread(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    figures = {"mean": np.mean, "max": np.max, "min": np.min, "std": np.std}
    return {f"{name}/{figure}": float(of(values)) for figure, of in figures.items()}


def _mean_staleness(samples: Sequence[TrainingSample]) -> float:
    """Return the mean staleness of the trained tokens in policy versions, or 0 without any."""
    trained = np.concatenate([sample.staleness[sample.counted] for sample in samples])
    return float(trained.mean()) if len(trained) else 0.0
