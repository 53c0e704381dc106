"""Group-relative advantages."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

STD_EPSILON = 1e-6
"""Keeps a nearly constant group from dividing by nothing; veRL's value."""


def group_relative_advantages(
    rewards_N: ArrayLike, prompt_keys_N: Sequence[str], *, normalise_by_std: bool
) -> NDArray[np.float64]:
    """The advantage of each response over the other responses of its prompt.

    `A_i = (r_i - mean(r)) / (std(r) + 1e-6)` over the group of response i (DeepSeekMath,
    arXiv:2402.03300, section 4.1.2, outcome supervision); every token of a response has the
    advantage of its response. The paper does not say which standard deviation: here it is the
    sample's (divisor G - 1), as in veRL. Without `normalise_by_std` the divisor is 1 (Dr. GRPO,
    arXiv:2503.20783, section 3.2). A group of equal rewards, or of one response, gets exactly 0.

    Args:
        rewards_N: one reward per response, of any sign.
        prompt_keys_N: which group each response belongs to; groups need not be contiguous.

    Returns:
        Advantages, shape [N].

    Raises:
        ValueError: a reward is not finite.
    """
    rewards = np.asarray(rewards_N, dtype=np.float64)
    assert rewards.shape == (len(prompt_keys_N),)
    if not np.isfinite(rewards).all():
        bad = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise ValueError(
            f"the reward of response {bad} (prompt {prompt_keys_N[bad]}) is {rewards[bad]}: "
            "a scorer must return finite numbers"
        )
    advantages = np.zeros_like(rewards)
    _, groups = np.unique(np.asarray(prompt_keys_N), return_inverse=True)
    for group in range(groups.max(initial=-1) + 1):
        members = groups == group
        advantages[members] = _within_group(rewards[members], normalise_by_std)
    return advantages


def _within_group(rewards_G: NDArray[np.float64], normalise: bool) -> NDArray[np.float64]:
    # Compared exactly: the mean of equal floats can differ from them in the last bit.
    if (rewards_G == rewards_G[0]).all():
        return np.zeros_like(rewards_G)
    centred = rewards_G - rewards_G.mean()
    return centred / (rewards_G.std(ddof=1) + STD_EPSILON) if normalise else centred
