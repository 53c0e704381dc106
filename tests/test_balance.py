"""Work over engines."""

from hypothesis import given
from hypothesis import strategies as st

from engines.balance import longest_first


@given(st.lists(st.floats(1, 1e4), min_size=1, max_size=60), st.integers(1, 8))
def test_shares_differ_by_one_item_at_most(sizes, num_shares):
    shares = longest_first(sizes, lambda size: size, num_shares)
    loads = [sum(share) for share in shares]
    assert sorted(size for share in shares for size in share) == sorted(sizes)
    assert max(loads) - min(loads) <= max(sizes) + 1e-6


def test_the_longest_go_first_to_the_share_that_has_least():
    sizes = {"a": 5, "b": 50, "c": 30, "d": 31, "e": 1}
    assert longest_first(list(sizes), sizes.__getitem__, 3) == [["b"], ["d", "e"], ["c", "a"]]


def test_of_those_that_have_as_much_the_first_is_next():
    assert longest_first([2, 2, 2, 1], lambda size: size, 3) == [[2, 1], [2], [2]]
