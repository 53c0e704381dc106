"""Group-relative advantages, and what is done to rewards before them."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

STD_EPSILON = 1e-6
"""Keeps a nearly constant group from dividing by nothing; veRL's value."""


def group_relative_advantage(
    reward: float,
    rewards_G: NDArray[np.float64],
    *,
    normalise_by_std: bool,
    baseline: str = "group_mean",
) -> float:
    """The advantage of a response over the known responses of its prompt, its own among them.

    `A_i = (r_i - mean(r)) / (std(r) + 1e-6)` over the group of response i (DeepSeekMath,
    arXiv:2402.03300, section 4.1.2, outcome supervision); every token of a response has the
    advantage of its response. The paper does not say which standard deviation: here it is the
    sample's (divisor G - 1), as in veRL. Without `normalise_by_std` the divisor is 1 (Dr. GRPO,
    arXiv:2503.20783, section 3.2). A group of equal rewards, or of one response, gets exactly 0.

    `leave_one_out` takes off the mean of the other responses (RLOO, arXiv:2402.14740):
    G / (G - 1) times the difference from the mean of all. `none` takes off nothing, and equal
    rewards keep their value.

    A deviation where responses are trained in a later step than the rest of their group: r are
    the rewards known when response i is trained, so those trained first have the baseline of an
    unfinished group, and a group's advantages need not add up to 0.
    """
    # Compared exactly: the mean of equal floats can differ from them in the last bit.
    if baseline != "none" and all_equal(rewards_G):
        return 0.0
    size = len(rewards_G)
    centred = reward - (0.0 if baseline == "none" else rewards_G.mean())
    if baseline == "leave_one_out":
        centred *= size / (size - 1)
    if not normalise_by_std or size == 1:
        return float(centred)
    return float(centred / (rewards_G.std(ddof=1) + STD_EPSILON))


def whitened(
    advantages_N: NDArray[np.float64], num_tokens_N: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Advantages less their mean, over their standard deviation, both over the tokens of the batch:
    response i has `num_tokens_N[i]` that count.

    `(A - mean(A)) / (std(A) + 1e-6)` (REINFORCE++, arXiv:2501.03262). Batches whose
    advantages are all equal, or that have no token, get exactly 0.
    """
    counted = advantages_N[num_tokens_N > 0]
    if len(counted) == 0 or all_equal(counted):
        return np.zeros_like(advantages_N)
    mean = np.average(advantages_N, weights=num_tokens_N)
    variance = np.average((advantages_N - mean) ** 2, weights=num_tokens_N)
    return (advantages_N - mean) / (np.sqrt(variance) + STD_EPSILON)


def all_equal(rewards_G: ArrayLike) -> bool:
    """Whether a group has no response better than another: nothing to learn from.

    DAPO's dynamic sampling (arXiv:2503.14476, section 3.2) leaves such groups out. A deviation:
    the paper compares whether the answers are correct, this any kind of rewards.
    """
    rewards = np.asarray(rewards_G)
    return bool((rewards == rewards[0]).all())


def overlong_punishments(
    num_tokens: ArrayLike, *, max_tokens: int, buffer_tokens: int, penalty: float
) -> NDArray[np.float64]:
    """Punishments added to the rewards of responses of these lengths; 0 or negative.

    `penalty * clip((max_tokens - buffer_tokens - length) / buffer_tokens, -1, 0)`: the soft
    overlong punishment of DAPO (arXiv:2503.14476, section 3.4, equation 13). The paper's penalty is
    1 for rewards of -1 and 1, half of their distance; for rewards of 0 and 1 that is 0.5. Without a
    buffer nobody is punished.
    """
    lengths = np.asarray(num_tokens, dtype=np.float64)
    if buffer_tokens == 0:
        return np.zeros_like(lengths)
    allowed = max_tokens - buffer_tokens
    return penalty * np.clip((allowed - lengths) / buffer_tokens, -1.0, 0.0)
