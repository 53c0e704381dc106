"""Ranking sorts all prompts by length and cuts them into groups of equal size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.histopipe.ranking import default_num_groups, length_growth, rank_prompts
from refrain.schemas.rollout import LengthHistory

keys = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, unique=True)
lengths = st.builds(LengthHistory, st.floats(1, 1e5), st.integers(1, 10**5))
histories = st.dictionaries(st.text("abcdef", min_size=1, max_size=4), lengths)


@given(keys, histories, st.integers(1, 20))
@settings(deadline=None)
def test_every_prompt_is_ranked_once_in_groups_of_equal_size(keys, history, num_groups):
    groups = rank_prompts(keys, history, num_groups)
    sizes = [len(group) for group in groups]
    assert sorted(key for group in groups for key in group) == sorted(keys)
    assert len(groups) == min(num_groups, len(keys))
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) > 0
    medians = [history[key].median_tokens for group in groups for key in group if key in history]
    assert medians == sorted(medians)


def test_ties_keep_the_order_given_and_unknown_prompts_go_to_the_middle():
    history = {key: LengthHistory(tokens, 0) for key, tokens in {"a": 9, "b": 1, "d": 5}.items()}
    history["c"] = LengthHistory(1, 0)
    # Known medians: 9, 1, 5, 1; their median is 3.
    assert rank_prompts(["a", "c", "new", "b", "d"], history, 5) == [
        ["c"], ["b"], ["new"], ["d"], ["a"]
    ]  # fmt: skip
    assert rank_prompts(["z", "y", "x"], {}, 2) == [["z"], ["y", "x"]]


def test_growth_is_the_75th_percentile_above_a_minimum():
    grown = {str(i): LengthHistory(100.0 * (1 + i), 0, 100.0) for i in range(5)}
    grown["once"] = LengthHistory(1e6, 0)
    assert length_growth(grown) == pytest.approx(4.0)
    assert length_growth(grown, minimum=4.5) == 4.5
    assert length_growth({"a": LengthHistory(50, 0, 100.0)}) == 1.1
    assert length_growth({"a": LengthHistory(50, 0)}) == 1.1


@pytest.mark.parametrize(
    ("num_engines", "num_groups"), [(1, 1), (2, 2), (7, 2), (12, 3), (32, 8), (64, 16), (512, 16)]
)
def test_four_engines_share_one_group(num_engines, num_groups):
    assert default_num_groups(num_engines) == num_groups
