"""OPO: the baseline that leaves the least variance."""

import numpy as np
from numpy.typing import NDArray


def opo_advantage(
    reward: float, rewards_G: NDArray[np.float64], lengths_G: NDArray[np.integer]
) -> float:
    """Return `r_i - sum(|o_j| r_j) / sum(|o_j|)`, over the responses j of the group.

    Source: On-Policy RL with Optimal Reward Baseline (arXiv:2505.23585), which assumes
    that the squared norm of a response's gradient grows with its length. veRL: the same.
    `lengths_G`: sampled tokens of each response. Equal rewards give exactly 0.
    """
    if (rewards_G == rewards_G[0]).all():
        return 0.0
    return float(reward - np.average(rewards_G, weights=lengths_G))
