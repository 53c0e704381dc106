"""Dealing groups to engines: each prompt goes to one engine, and loads are nearly even."""

from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.histopipe.placement import deal_groups

lengths = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4), st.none() | st.floats(1, 1e5), min_size=1
)


@given(lengths, st.integers(1, 9))
def test_every_prompt_is_dealt_once_and_loads_are_near_even(by_key, num_engines):
    known = {key: value for key, value in by_key.items() if value is not None}
    groups = deal_groups(list(by_key), known, num_engines)
    assert sorted(group.prompt_key for group in groups) == sorted(by_key)
    assert {group.engine for group in groups} <= set(range(num_engines))
    typical = sum(known.values()) / len(known) if known else 1.0
    loads = [0.0] * num_engines
    for group in groups:
        loads[group.engine] += known.get(group.prompt_key, typical)
    # The longest group is dealt first, so loads differ by at most one group.
    longest = max([typical, *known.values()])
    assert max(loads) - min(loads) <= longest * (1 + 1e-9)


def test_the_longest_groups_come_first_and_unknown_ones_count_as_typical():
    groups = deal_groups(["short", "new", "long"], {"short": 10, "long": 100}, 2)
    assert [group.prompt_key for group in groups] == ["long", "new", "short"]
    assert [group.engine for group in groups] == [0, 1, 1]
    assert groups[1].expected_tokens is None
