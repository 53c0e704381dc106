"""Placement of engines, drafters and the trainer on the GPUs of a cluster."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.gpus.placement import GpuPlacement, Wanted, place


def engines(num, tp_degree):
    return [Wanted(f"engine {i}", tp_degree, "rollout") for i in range(num)]


def trainer(num):
    return Wanted("the trainer", num, "trainer.num_processes", spreads=True)


def test_ranks_leave_nodes_whole_for_engines_that_need_them():
    placed = place([trainer(4), *engines(1, 8)], {"a": 8, "b": 8})
    assert len(set(placed["engine 0"])) == 1
    assert set(placed["engine 0"]).isdisjoint(placed["the trainer"])


def test_a_trainer_is_on_one_node_where_one_has_room():
    placed = place([trainer(4), *engines(3, 4)], {"a": 8, "b": 8})
    assert len(set(placed["the trainer"])) == 1


def test_a_trainer_that_is_larger_than_a_node_takes_whole_ones():
    placed = place([trainer(12), *engines(2, 2)], {"a": 8, "b": 8})
    assert Counter(Counter(placed["the trainer"]).values()) == {8: 1, 4: 1}
    ranks = placed["the trainer"]
    assert list(ranks) == sorted(ranks, key=ranks.index), "ranks of a node must be consecutive"


def test_drafters_are_beside_the_engines_that_they_feed():
    drafter = Wanted("drafter", 1, "specactor", beside=("engine 0", "engine 1"))
    placed = place([drafter, *engines(2, 2), Wanted("other", 6, "other")], {"a": 8, "b": 6, "c": 1})
    assert placed["drafter"] == placed["engine 0"][:1] == placed["engine 1"][:1]
    # Without room beside them, the drafter goes anywhere.
    placed = place([drafter, *engines(2, 2)], {"a": 4, "c": 1})
    assert placed["drafter"] == ("c",)


def test_sharing_trainer_uses_the_first_engine_gpus():
    in_turn = replace(trainer(3), within=("engine 0", "engine 1"))
    placed = place([in_turn, *engines(2, 2)], {"a": 2, "b": 2})
    both = (*placed["engine 0"], *placed["engine 1"])
    assert placed["the trainer"] == both[:3]
    with pytest.raises(ValueError, match=r"wants 5 GPUs .* in turn .* which have 4"):
        place([replace(in_turn, num_gpus=5), *engines(2, 2)], {"a": 8})
    with pytest.raises(ValueError, match=r"takes 4 GPUs \(4 for rollout\), free are 3"):
        place([in_turn, *engines(2, 2)], {"a": 3})


def test_the_refusal_has_the_arithmetic():
    wanted = [*engines(3, 4), trainer(3)]
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        place(wanted, {"a": 6, "b": 6, "c": 2})
    assert str(refused.value) == (
        "engine 2 wants 4 GPUs of one node, and there is no room: the run takes 15 GPUs (12 for "
        "rollout, 3 for trainer.num_processes), free are 6, 6, 2 by node; 2, 2, 2 of them when "
        "engine 2 is placed. Lower these settings, or add nodes"
    )
    with pytest.raises(ValueError, match=r"the trainer wants 3 GPUs, and .* free are none"):
        place([trainer(3)], {})


def test_parts_without_gpus_are_anywhere():
    assert GpuPlacement().node("engine 0") is None
    assert place([], {}) == {}


powers = st.sampled_from([1, 2, 4, 8])


@given(
    st.lists(powers, max_size=8),
    st.integers(0, 20),
    st.lists(powers, min_size=1, max_size=6),
)
def test_powers_of_two_are_placed_whenever_they_can_be(sizes, ranks, nodes):
    """Each GPU has one owner. A placement is refused only when none exists."""
    wanted = [*(Wanted(str(i), size, "engines") for i, size in enumerate(sizes)), trainer(ranks)]
    free = {str(i): num for i, num in enumerate(nodes)}
    try:
        placed = place(wanted, free)
    except ValueError:
        assert not fits(sorted(sizes, reverse=True), sorted(nodes), ranks)
        return
    assert {what: len(of) for what, of in placed.items()} == {w.what: w.num_gpus for w in wanted}
    taken = Counter(node for of in placed.values() for node in of)
    assert all(taken[node] <= num for node, num in free.items())
    assert all(len(set(placed[str(i)])) == 1 for i in range(len(sizes)))


def fits(sizes, nodes, ranks):
    """Return whether any placement exists, by trying all."""
    if not sizes:
        return sum(nodes) >= ranks
    size, *rest = sizes
    tried = {num for num in nodes if num >= size}
    return any(fits(rest, sorted(_without(nodes, num, size)), ranks) for num in tried)


def _without(nodes, num, size):
    left = list(nodes)
    left[left.index(num)] -= size
    return left
