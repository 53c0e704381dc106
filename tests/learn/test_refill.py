"""Dynamic sampling: how many further prompts a step draws to replace groups of equal rewards."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.learn.refill import num_to_draw, num_useful
from refrain.engines.store.tables import REWARDS


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 60), st.integers(1, 60))
def test_missing_prompts_are_replaced(useful: int, dull: int, wanted: int, batch: int) -> None:
    drawn = useful + dull
    num = num_to_draw(useful, drawn, wanted, batch)
    assert 0 <= num <= batch
    assert (num == 0) == (useful >= wanted)
    if 0 < num < batch:
        # The smallest number that suffices if the share of useful prompts stays the same.
        missing = wanted - useful
        assert num * useful >= missing * drawn > (num - 1) * useful


def test_groups_count_by_their_own_samples() -> None:
    rows = [
        *[("a", 0, 1.0), ("a", 1, 0.0)],
        *[("b", 0, 1.0), ("b", 1, 1.0), ("b", -1, 0.0)],  # The last one was deferred to this step.
        *[("c", 0, 0.0), ("c", 1, 0.5)],
        *[("d", 0, 0.0), ("d", 1, 1.0)],
    ]
    columns = [
        dict(zip(("prompt_key", "sample_index", "reward"), row, strict=True)) for row in rows
    ]
    table = pa.Table.from_pylist([row | {"extra": "{}"} for row in columns], schema=REWARDS)
    assert num_useful(table, ["a", "b", "c", "e"]) == 2
    assert num_useful(table, ["b"]) == 0


def test_a_group_teaches_nothing_if_less_than_two_are_left() -> None:
    """Failed conversations have no reward (`environment.on_error: leave_out`)."""
    rows = [("a", 0, 1.0), ("b", 1, 1.0), ("b", 3, 0.0)]
    columns = dict(
        zip(("prompt_key", "sample_index", "reward"), zip(*rows, strict=True), strict=True)
    )
    assert num_useful(pa.table(columns | {"extra": ["{}"] * 3}), ["a", "b", "c"]) == 1
