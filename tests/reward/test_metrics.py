"""Metrics of a validation: mean, best, majority and pass@k over the samples of each prompt."""

import json
from itertools import combinations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.reward.metrics import majority_of, pass_at, sample_figures


def make_rewards(groups: dict[str, list[tuple[float, dict]]]) -> pa.Table:
    rows = [
        {"prompt_key": key, "sample_index": i, "reward": reward, "extra": json.dumps(extra)}
        for key, group in groups.items()
        for i, (reward, extra) in enumerate(group)
    ]
    return pa.Table.from_pylist(rows)


def test_figures_by_data_source():
    right, wrong = (1.0, {"pred": "4"}), (0.0, {"pred": "5"})
    rewards = make_rewards(
        {
            "a": [right, wrong, right],
            "b": [wrong, wrong, right],
            "c": [(0.25, {}), (0.5, {}), (0.75, {})],
        }
    )
    code, maths = sample_figures(rewards, {"a": "math", "b": "math", "c": "code"})
    assert (code.data_source, code.num_prompts) == ("code", 1)
    assert code.figures == {"mean@3": 0.5, "best@3": 0.75}
    assert (maths.data_source, maths.num_prompts) == ("math", 2)
    assert maths.figures == pytest.approx(
        {
            "mean@3": 0.5,
            "best@3": 1.0,
            "maj@3": 0.5,
            "std_error@3": 1 / 6,  # The prompts' means are 2/3 and 1/3.
            "pass@2": (1.0 + 2 / 3) / 2,
        }
    )


@given(
    st.lists(st.sampled_from(["4", "5", None]), min_size=1, max_size=9),
)
def test_the_majority_is_that_of_a_count_by_hand(answers):
    """veRL's `calc_maj_val` counts like this: every sample votes, and the first answer wins a
    tie."""
    group = [(float(at), {"pred": answer}) for at, answer in enumerate(answers)]
    most = max(answers.count(answer) for answer in answers)
    winner = next(answer for answer in answers if answers.count(answer) == most)
    assert majority_of(group) == answers.index(winner)


@pytest.mark.parametrize("num_right", range(6))
@pytest.mark.parametrize("k", [2, 4])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(num_right: int, k: int) -> None:
    group = [(float(at < num_right), {}) for at in range(5)]
    draws = list(combinations(group, k))
    expected = sum(any(reward for reward, _ in draw) for draw in draws) / len(draws)
    assert pass_at(k, group) == pytest.approx(expected)


def test_figures_that_need_more_are_left_out() -> None:
    """One prompt gives no standard error. A reward between 0 and 1 neither passes nor fails, so it
    gives no pass@k."""
    (one,) = sample_figures(make_rewards({"a": [(0.5, {})] * 4}), {"a": "math"})
    assert one.figures.keys() == {"mean@4", "best@4"}
    (right,) = sample_figures(make_rewards({"a": [(1.0, {})] * 8}), {"a": "math"})
    assert right.figures.keys() == {"mean@8", "best@8", "pass@2", "pass@4"}
