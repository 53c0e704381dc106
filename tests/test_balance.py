"""Ways to share work among engines."""

from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.balance import in_turn, longest_first, places_after


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


@given(st.integers(1, 40), st.sampled_from([(1, 4), (2, 4), (4, 2), (8, 2), (4, 1), (3, 3)]))
def test_dealing_in_turn_survives_a_layout_change(num_keys, layouts):
    before, after = layouts
    found = {}
    for place in range(before):
        place_of = in_turn(places_after(place, before, after))
        for key in range(place, num_keys, before):
            assert place_of(key) == place_of(key), "two samples of a key are apart"
            found[key] = place_of(key)
    assert found == {key: key % after for key in range(num_keys)}
