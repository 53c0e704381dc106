"""Group-relative advantages, and the length punishment that is added to rewards before."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

STD_EPSILON = 1e-6
"""Added to the standard deviation, so that a nearly constant group does not divide by zero. veRL's
value."""


def group_relative_advantage(
    reward: float,
    rewards_G: NDArray[np.float64],
    *,
    normalise_by_std: bool,
    baseline: str = "group_mean",
) -> float:
    """Return the advantage of a response over the known responses of its prompt, itself included.

    `A_i = (r_i - mean(r)) / (std(r) + 1e-6)` over the group of response i (DeepSeekMath,
    arXiv:2402.03300, section 4.1.2, outcome supervision). Every token of a response has its
    response's advantage. The paper does not say which standard deviation it uses: here it is the
    sample's (divisor G - 1), as in veRL. Without `normalise_by_std` the divisor is 1 (Dr. GRPO,
    arXiv:2503.20783, section 3.2). A group of equal rewards, or of one response, gets exactly 0.

    `leave_one_out` subtracts the mean of the other responses (RLOO, arXiv:2402.14740). The result
    is G / (G - 1) times the difference from the mean of all. `none` subtracts nothing, and equal
    rewards keep their value.

    A deviation when some responses are trained in a later step than others of their group: r are
    the rewards known when response i is trained. So the first ones use the baseline of an
    unfinished group, and a group's advantages need not sum to 0.
    """
    # Compare exactly: the mean of equal floats can differ from them in the last bit.
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
    """Return the advantages, normalised over the tokens of the batch. Response i has
    `num_tokens_N[i]` tokens that count.

    `(A - mean(A)) / (std(A) + 1e-6)` (REINFORCE++, arXiv:2501.03262). Batches whose advantages are
    all equal, or that have no token, get exactly 0.
    """
    counted = advantages_N[num_tokens_N > 0]
    if len(counted) == 0 or all_equal(counted):
        return np.zeros_like(advantages_N)
    mean = np.average(advantages_N, weights=num_tokens_N)
    variance = np.average((advantages_N - mean) ** 2, weights=num_tokens_N)
    return (advantages_N - mean) / (np.sqrt(variance) + STD_EPSILON)


def all_equal(rewards_G: ArrayLike) -> bool:
    """Return whether all rewards of a group are equal, so that there is nothing to learn.

    DAPO's dynamic sampling (arXiv:2503.14476, section 3.2) leaves such groups out. A deviation: the
    paper compares whether answers are correct; this function compares any kind of reward.
    """
    rewards = np.asarray(rewards_G)
    return bool((rewards == rewards[0]).all())


def overlong_punishments(
    num_tokens: ArrayLike, *, max_tokens: int, buffer_tokens: int, penalty: float
) -> NDArray[np.float64]:
    """Return the punishments to add to the rewards of responses of these lengths; 0 or negative.

    `penalty * clip((max_tokens - buffer_tokens - length) / buffer_tokens, -1, 0)`: the soft
    overlong punishment of DAPO (arXiv:2503.14476, section 3.4, equation 13). The paper uses a
    penalty of 1 for rewards of -1 and 1, half of their distance. For rewards of 0 and 1 that would
    be 0.5. Without a buffer there is no punishment.
    """
    lengths = np.asarray(num_tokens, dtype=np.float64)
    if buffer_tokens == 0:
        return np.zeros_like(lengths)
    allowed = max_tokens - buffer_tokens
    return penalty * np.clip((allowed - lengths) / buffer_tokens, -1.0, 0.0)
