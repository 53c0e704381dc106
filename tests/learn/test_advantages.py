"""Advantages of groups, against a plain reference; overlong punishment."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from refrain.engines.learn.advantages import (
    all_equal,
    group_relative_advantage,
    overlong_punishments,
    whitened,
)
from refrain.schemas.algorithm import AlgorithmConfig


def group_relative_advantages(
    rewards: Sequence[float], groups: Sequence[Sequence[float]], *, normalise_by_std: bool
) -> NDArray:
    """Return the advantage of each response, given the rewards of its group."""
    return np.array(
        [
            group_relative_advantage(reward, np.asarray(group), normalise_by_std=normalise_by_std)
            for reward, group in zip(rewards, groups, strict=True)
        ]
    )


def by_keys(rewards: list[float], keys: list[str]) -> list[list[float]]:
    """Return, for each sample, the rewards of all samples with its key."""
    pairs = list(zip(rewards, keys, strict=True))
    return [[reward for reward, other in pairs if other == key] for key in keys]


def reference_advantages(rewards_N: NDArray, keys_N: list[str], normalise: bool) -> NDArray:
    """Return advantages computed group by group. Correct for complete groups only."""
    advantages = np.zeros_like(rewards_N)
    _, groups = np.unique(np.asarray(keys_N), return_inverse=True)
    for group in range(groups.max() + 1):
        rewards_G = rewards_N[groups == group]
        if (rewards_G == rewards_G[0]).all():
            continue
        centred = rewards_G - rewards_G.mean()
        divisor = rewards_G.std(ddof=1) + 1e-6 if normalise else 1.0
        advantages[groups == group] = centred / divisor
    return advantages


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(-9, 9)), min_size=1, max_size=40),
    st.booleans(),
)
def test_whole_groups_have_the_same_bits_as_group_by_group(
    samples: list[tuple[str, float]], normalise: bool
) -> None:
    keys, rewards = [key for key, _ in samples], [reward for _, reward in samples]
    groups = by_keys(rewards, keys)
    advantages = group_relative_advantages(rewards, groups, normalise_by_std=normalise)
    expected = reference_advantages(np.asarray(rewards), keys, normalise)
    assert advantages.tobytes() == expected.tobytes()


def test_the_baseline_is_that_of_all_known_rewards() -> None:
    """A deferred sample may be alone in its batch. Its baseline is still the mean of its whole
    group, trained samples included."""
    group = [0.0, 0.0, 1.0, 3.0]
    (advantage,) = group_relative_advantages([3.0], [group], normalise_by_std=True)
    assert advantage == pytest.approx((3.0 - 1.0) / (np.sqrt(2.0) + 1e-6))
    assert group_relative_advantages([3.0], [[3.0]], normalise_by_std=True).tolist() == [0.0]


@pytest.mark.parametrize("reward", [0.1, -1e9, 0.0])
def test_equal_rewards_teach_nothing(reward: float) -> None:
    group = [reward] * 3
    assert not group_relative_advantages(group, [group] * 3, normalise_by_std=True).any()
    assert all_equal(group)
    assert not all_equal([*group, reward + 1.0])


@given(
    st.lists(st.integers(-20, 20), min_size=2, max_size=12),
    st.floats(0.5, 50.0),
    st.floats(-5.0, 5.0),
)
def test_normalised_advantages_ignore_scale_and_shift(
    rewards: list[int], scale: float, shift: float
) -> None:
    first = group_relative_advantages(rewards, [rewards] * len(rewards), normalise_by_std=True)
    moved = np.array(rewards) * scale + shift
    if len(set(rewards)) > 1:
        second = group_relative_advantages(moved, [moved] * len(moved), normalise_by_std=True)
        np.testing.assert_allclose(first, second, atol=1e-4)


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 49))
def test_overlong_punishment_equals_the_cases_of_the_paper(lengths: list[int], buffer: int) -> None:
    def case(length: int) -> float:
        if length <= 50 - buffer:
            return 0.0
        return ((50 - buffer) - length) / buffer if length <= 50 else -1.0

    punished = overlong_punishments(lengths, max_tokens=50, buffer_tokens=buffer, penalty=1.0)
    np.testing.assert_allclose(punished, [case(length) for length in lengths], atol=1e-12)


def test_zero_buffer_gives_no_punishment() -> None:
    off = overlong_punishments([1, 50], max_tokens=50, buffer_tokens=0, penalty=1.0)
    assert off.tolist() == [0.0, 0.0]


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=8), st.data())
def test_dapos_rewards_of_minus_one_and_one_give_the_same_advantages(
    rewards: list[float], data: st.DataObject
) -> None:
    """Our default penalty is 0.5 because our rewards are 0 and 1. The paper has a penalty of 1 with
    rewards of -1 and 1."""
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=len(rewards), max_size=len(rewards)))

    def advantages(scale: float, shift: float, penalty: float) -> NDArray:
        limits = {"max_tokens": 20, "buffer_tokens": 4, "penalty": penalty}
        group = np.array(rewards) * scale + shift + overlong_punishments(lengths, **limits)
        return group_relative_advantages(group, [group] * len(group), normalise_by_std=True)

    ours = advantages(1.0, 0.0, AlgorithmConfig().overlong_penalty)
    np.testing.assert_allclose(ours, advantages(2.0, -1.0, 1.0), atol=1e-4)


@given(st.lists(st.integers(-20, 20), min_size=2, max_size=12))
def test_leave_one_out_is_the_mean_of_the_others(rewards: list[int]) -> None:
    given = {"normalise_by_std": False, "baseline": "leave_one_out"}
    group = np.array(rewards, dtype=np.float64)
    for at, reward in enumerate(rewards):
        expected = reward - np.delete(group, at).mean()
        found = group_relative_advantage(float(reward), group, **given)
        assert found == pytest.approx(expected, abs=1e-9)


def test_without_a_baseline_equal_rewards_keep_their_value() -> None:
    given = {"normalise_by_std": False, "baseline": "none"}
    assert group_relative_advantage(0.5, np.array([0.5, 0.5]), **given) == 0.5


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 5)), min_size=1, max_size=20))
def test_whitened_advantages_have_mean_0_and_deviation_1_over_tokens(
    samples: list[tuple[int, int]],
) -> None:
    advantages, counts = (np.array(values) for values in zip(*samples, strict=True))
    found = whitened(advantages.astype(float), counts)
    of_tokens = np.repeat(found, counts)
    if not of_tokens.any():
        assert len(set(advantages[counts > 0])) <= 1
    else:
        assert of_tokens.mean() == pytest.approx(0.0, abs=1e-9)
        assert of_tokens.std() == pytest.approx(1.0, abs=1e-5)
