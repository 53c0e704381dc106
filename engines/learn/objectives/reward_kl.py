"""The KL penalty as a part of the rewards."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def kl_rewards(
    rewards_N: Sequence[float],
    kl_N: Sequence[float],
    groups_N: Sequence[tuple[int, str]],
    coefficient: float,
) -> list[tuple[float, NDArray[np.float64]]]:
    """Return `r_i - coefficient * sum over t of d_it` of each response, and these rewards of its
    group. `d = log pi_inference - log pi_ref`, the k1 estimate of the KL divergence.

    Source: RLOO (arXiv:2402.14740, section 2), for whole responses. The baseline is
    then that of the penalised rewards, as in veRL's `use_kl_in_reward` with group estimators. A
    deviation: d is that of the engine's policy, which drew the tokens, without another pass.

    `kl_N`: sum of d over each response. `groups_N`: key of each response's group, all of whose
    responses must be here.
    """
    penalised = np.asarray(rewards_N) - coefficient * np.asarray(kl_N)
    members: dict[tuple[int, str], list[float]] = {}
    for group, reward in zip(groups_N, penalised, strict=True):
        members.setdefault(group, []).append(reward)
    arrays = {group: np.array(own) for group, own in members.items()}
    return [
        (float(reward), arrays[group]) for reward, group in zip(penalised, groups_N, strict=True)
    ]
