"""A step without room for all draft tokens verifies the likeliest ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.histospec.budget import keep_likeliest, max_draft_tokens


def test_the_likeliest_are_kept_and_not_an_equal_share_of_each():
    probabilities = np.array([[0.9, 0.8, 0.7], [0.3, 0.2, 0.1], [0.75, 0.1, 0.0]])
    num_drafted = np.array([3, 3, 2], np.int32)
    assert keep_likeliest(probabilities, num_drafted, 4).tolist() == [3, 0, 1]
    assert keep_likeliest(probabilities, num_drafted, 0).tolist() == [0, 0, 0]
    assert keep_likeliest(probabilities, num_drafted, 8) is num_drafted


@given(
    st.lists(
        st.lists(st.floats(0.0, 1.0), max_size=5).map(lambda p: sorted(p, reverse=True)),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 30),
)
def test_the_room_is_used_and_nothing_likelier_is_left_out(rows, max_tokens):
    window = max(map(len, rows))
    probabilities = np.zeros((len(rows), window))
    for row, own in zip(probabilities, rows, strict=True):
        row[: len(own)] = own
    num_drafted = np.array(list(map(len, rows)), np.int32)
    kept = keep_likeliest(probabilities, num_drafted, max_tokens)
    assert (kept <= num_drafted).all()
    assert kept.sum() == min(max_tokens, num_drafted.sum())
    taken = [p for own, num in zip(rows, kept, strict=True) for p in own[:num]]
    left = [p for own, num in zip(rows, kept, strict=True) for p in own[num:]]
    assert min(taken, default=1.0) >= max(left, default=0.0)


@pytest.mark.parametrize(
    ("step_tokens", "num_rows", "most"), [(8192, 256, 3968), (300, 256, 22), (256, 256, 0)]
)
def test_prompts_have_as_much_of_a_step_as_drafts(step_tokens, num_rows, most):
    assert max_draft_tokens(step_tokens, num_rows) == most
    assert step_tokens - num_rows - most >= most
