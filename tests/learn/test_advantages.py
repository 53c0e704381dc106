import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.learn.advantages import group_relative_advantages


def test_hand_computed_values_of_interleaved_groups() -> None:
    rewards = [1.0, -2.0, 0.0, 4.0, 2.0]
    keys = ["a", "b", "a", "b", "a"]
    plain = group_relative_advantages(rewards, keys, normalise_by_std=False)
    assert plain.tolist() == [0.0, -3.0, -1.0, 3.0, 1.0]
    scaled = group_relative_advantages(rewards, keys, normalise_by_std=True)
    # std of (1, 0, 2) is 1; std of (-2, 4) is sqrt(18)
    deviations = np.sqrt([1.0, 18.0, 1.0, 18.0, 1.0])
    expected = np.array([0.0, -3.0, -1.0, 3.0, 1.0]) / (deviations + 1e-6)
    np.testing.assert_allclose(scaled, expected, rtol=1e-12)


@pytest.mark.parametrize("reward", [0.1, -1e9, 0.0])
def test_equal_rewards_teach_nothing(reward: float) -> None:
    assert not group_relative_advantages([reward] * 3, ["a"] * 3, normalise_by_std=True).any()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-50, 50)), min_size=1, max_size=30))
def test_each_group_has_zero_mean_and_unit_deviation(samples: list[tuple[str, int]]) -> None:
    keys = [key for key, _ in samples]
    rewards = np.array([reward for _, reward in samples], dtype=float)
    advantages = group_relative_advantages(rewards, keys, normalise_by_std=True)
    for key in set(keys):
        group = advantages[[other == key for other in keys]]
        assert abs(group.mean()) < 1e-9
        assert not group.any() or group.std(ddof=1) == pytest.approx(1.0, abs=1e-5)


@given(
    st.lists(st.integers(-20, 20), min_size=2, max_size=12),
    st.floats(0.5, 50.0),
    st.floats(-5.0, 5.0),
)
def test_normalised_advantages_ignore_scale_and_shift(
    rewards: list[int], scale: float, shift: float
) -> None:
    keys = ["a"] * len(rewards)
    first = group_relative_advantages(rewards, keys, normalise_by_std=True)
    moved = np.array(rewards) * scale + shift
    if len(set(rewards)) > 1:
        second = group_relative_advantages(moved, keys, normalise_by_std=True)
        np.testing.assert_allclose(first, second, atol=1e-4)


def test_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt b"):
        group_relative_advantages([1.0, float("nan")], ["a", "b"], normalise_by_std=True)
