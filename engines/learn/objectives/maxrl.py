"""MaxRL: advantages relative to the group's mean reward."""

import numpy as np
from numpy.typing import NDArray


def maxrl_advantage(reward: float, rewards_G: NDArray[np.float64]) -> float:
    """Return `(r_i - mean(r)) / mean(r)` of a response, or 0 if no reward of its group is positive.

    Source: Maximum Likelihood Reinforcement Learning (arXiv:2602.02710), whose estimator averages
    the scores of the right responses, with the mean of all as control variate. The paper has
    rewards of 0 and 1. Here other rewards of 0 or more divide by their mean, too.

    Raises ValueError for a negative reward, for which the mean is no success rate.
    """
    if (rewards_G < 0.0).any():
        raise ValueError(
            f"algorithm.scale_rewards is mean, and a group has the rewards {rewards_G.tolist()}: a "
            "mean of negative rewards is no success rate. Return rewards of 0 or more, or set "
            "algorithm.scale_rewards=group"
        )
    mean = rewards_G.mean()
    return float((reward - mean) / mean) if mean > 0.0 else 0.0
