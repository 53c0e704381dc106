"""Requests of one submission begin together, and every request begins."""

from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.inference.engine.arrivals import Arrivals


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(), st.data())
def test_a_batch_begins_when_its_last_request_comes(sizes, random, data):
    coming = [(f"batch {i}", j, size) for i, size in enumerate(sizes) for j in range(size)]
    random.shuffle(coming)
    arrivals, here = Arrivals(), {f"batch {i}": [] for i in range(len(sizes))}
    begun, num_come = [], dict.fromkeys(here, 0)
    for batch, number, size in coming:
        begins = arrivals.begin_with((batch, number), batch, size)
        here[batch].append((batch, number))
        num_come[batch] += 1
        assert begins == (here[batch] if num_come[batch] == size else [])
        begun += begins
        if data.draw(st.booleans()):
            begun += arrivals.begin_at_once()
            here = {name: [] for name in here}
    assert sorted(begun) == sorted((batch, number) for batch, number, _ in coming)


def test_late_requests_still_wait_for_each_other():
    arrivals = Arrivals()
    assert arrivals.begin_with("first", "a", 3) == []
    assert arrivals.begin_at_once() == ["first"]
    assert arrivals.begin_at_once() == []
    assert arrivals.begin_with("second", "a", 3) == []
    assert arrivals.begin_with("third", "a", 3) == ["second", "third"]


def test_nothing_is_left_of_a_batch_that_has_begun():
    arrivals = Arrivals()
    assert arrivals.begin_with("first", "a", 1) == ["first"]
    assert arrivals.begin_with("second", "a", 2) == []
