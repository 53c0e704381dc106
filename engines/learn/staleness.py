"""Tokens that are too old to be trained on.

A step of policy version v trains tokens of versions v - max_staleness to v. A sample that was
deferred from an earlier step may begin with older tokens: those are masked, the rest is trained.
Anywhere else an older token, and a newer one everywhere, is an error of whoever made the batch.
"""

import numpy as np
from numpy.typing import NDArray

from engines.learn.rollouts import Rollouts


class StalenessError(ValueError):
    """A batch holds tokens of a policy version that it must not hold."""


def fresh_tokens(
    rollouts: Rollouts, policy_version: int, max_staleness: int
) -> list[NDArray[np.bool_]]:
    """Whether each response token's version is at least `policy_version - max_staleness`.

    Raises:
        StalenessError: a token is of a later version than `policy_version`, or one of a sample
            that was not deferred is too old.
    """
    oldest = policy_version - max_staleness
    for sample, versions in enumerate(rollouts.versions):
        deferred = rollouts.groups[sample].origin_step <= policy_version
        if versions.max() > policy_version or (versions.min() < oldest and not deferred):
            raise StalenessError(_complaint(rollouts, sample, policy_version, oldest))
    return [versions >= oldest for versions in rollouts.versions]


def _complaint(rollouts: Rollouts, sample: int, policy_version: int, oldest: int) -> str:
    group, versions = rollouts.groups[sample], rollouts.versions[sample]
    return (
        f"sample {rollouts.sample_indices[sample]} of prompt {group.prompt_key}, planned for step "
        f"{group.origin_step}, has tokens of policy versions {versions.min()} to {versions.max()}; "
        f"policy version {policy_version} is trained on versions {oldest} to {policy_version}, and "
        f"on older ones only in samples deferred from before step {policy_version + 1}: resume the "
        "run from its last checkpoint, which removes what does not belong to it"
    )
