"""In a pool, the engines of each layout fill the GPUs. A higher layout's shard on a GPU lies in the
lower layout's shard on it."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.latency.model_shape import SHAPES
from refrain.engines.pat.layouts import (
    EngineSpec,
    merge_devices,
    place_engines,
    plan_layouts,
    plan_pools,
    require_divisible,
)
from refrain.schemas.layout import Pool

factors = st.integers(2, 4)
chains = st.tuples(st.integers(1, 3), st.lists(factors, min_size=1, max_size=3), st.integers(1, 2))


def degrees_of(base: int, steps: list[int]) -> list[int]:
    return list(itertools.accumulate([base, *steps], lambda a, b: a * b))


def shards(engines, tp_degree) -> dict[int, tuple[Fraction, Fraction]]:
    """Return the part (begin, end) of each weight that each GPU holds, from 0 to 1."""
    return {
        gpu: (Fraction(rank, tp_degree), Fraction(rank + 1, tp_degree))
        for engine in engines
        for rank, gpu in enumerate(engine)
    }


def device_order(tp_degree: int, num_engines: int) -> tuple[int, ...]:
    """Return the GPUs, by rank, of an engine that merges `num_engines` engines."""
    merged = tp_degree * num_engines
    return plan_layouts(merged, (tp_degree, merged))[merged][0]


@given(chains)
def test_each_shard_lies_in_that_of_the_layout_before(chain):
    base, steps, engines = chain
    degrees = degrees_of(base, steps)
    layouts = plan_layouts(degrees[-1] * engines, degrees)
    parts = [shards(layouts[degree], degree) for degree in degrees]
    for lower, higher in itertools.combinations(parts, 2):
        assert lower.keys() == higher.keys() == set(range(degrees[-1] * engines))
        for gpu, (begin, end) in higher.items():
            assert lower[gpu][0] <= begin
            assert end <= lower[gpu][1]


def test_in_their_own_order_shards_lie_elsewhere():
    """Negative control: with GPUs 0, 1, 2, 3 as the ranks of TP 4, two shards lie outside those of
    TP 2."""
    before, after = shards([(0, 1), (2, 3)], 2), shards([(0, 1, 2, 3)], 4)
    outside = [gpu for gpu, part in after.items() if not before[gpu][0] <= part[0] < before[gpu][1]]
    assert outside == [1, 2]


@given(st.integers(1, 8), st.integers(1, 8))
def test_one_merge_has_the_order_of_the_formula(tp, num):
    order = device_order(tp, num)
    assert order == tuple((rank % num) * tp + rank // num for rank in range(tp * num))


def test_a_chain_is_not_what_one_merge_would_be():
    """The TP 8 shards of the chain lie in the TP 4 shards. Those of a direct merge do not."""
    layouts = plan_layouts(8, (2, 4, 8))
    assert layouts[4] == ((0, 2, 1, 3), (4, 6, 5, 7))
    assert layouts[8] == ((0, 4, 2, 6, 1, 5, 3, 7),)
    assert merge_devices(layouts[4]) != device_order(2, 4)


def test_engines_of_the_base_keep_their_indices():
    pools, specs = plan_pools(8, 2, (4, 8), 8)
    assert pools == (
        Pool(0, {2: (0, 1, 2, 3), 4: (8, 9), 8: (10,)}),
        Pool(1, {2: (4, 5, 6, 7), 4: (11, 12), 8: (13,)}),
    )
    assert [spec.engine for spec in specs] == list(range(14))
    assert specs[5] == EngineSpec(5, 2, 1, (2, 3), standby=False)
    assert specs[12] == EngineSpec(12, 4, 1, (4, 6, 5, 7), standby=True)
    assert pools[0].base == 2


@given(chains, st.integers(1, 3))
def test_every_layout_fills_every_node_once(chain, num_nodes):
    base, steps, engines = chain
    degrees = degrees_of(base, steps)
    node = degrees[-1] * engines
    pools, specs = plan_pools(node // base * num_nodes, base, degrees[1:], node)
    assert len(pools) == num_nodes
    for pool, degree in itertools.product(pools, degrees):
        here = [specs[engine] for engine in pool.engines[degree]]
        assert sorted(gpu for spec in here for gpu in spec.devices) == list(range(node))
        assert {(spec.pool, spec.tp_degree) for spec in here} == {(pool.index, degree)}
    indices = [engine for pool in pools for of in pool.engines.values() for engine in of]
    assert sorted(indices) == [spec.engine for spec in specs] == list(range(len(specs)))
    assert [s.engine for s in specs if not s.standby] == list(range(node // base * num_nodes))


def test_less_than_a_node_is_a_pool_too():
    ((pool,), specs) = plan_pools(2, 1, (2,), 8)
    assert pool == Pool(0, {1: (0, 1), 2: (2,)})
    assert specs[2].devices == (0, 1)


def test_without_higher_degrees_there_is_no_pool():
    pools, specs = plan_pools(3, 2, (), 8)
    assert pools == ()
    assert [(s.engine, s.pool, s.devices, s.standby) for s in specs] == [
        (engine, None, (), False) for engine in range(3)
    ]


@pytest.mark.parametrize(
    ("engines", "tp", "higher", "node", "message"),
    [
        (4, 2, (3,), 8, "3 is not a multiple of 2"),
        (4, 2, (2,), 8, "2 is not a multiple of 2"),
        (4, 1, (4, 2), 8, "2 is not a multiple of 4"),
        (6, 2, (4,), 8, "12 GPUs .* not a whole number of nodes of 8"),
        (3, 2, (4,), 8, "TP degree 4 do not fill the 6 GPUs"),
        (4, 2, (16,), 8, "TP degree 16 do not fill the 8 GPUs"),
        (6, 3, (6,), 9, "TP degree 6 do not fill the 9 GPUs"),
        (8, 3, (6,), 8, "TP degree 3 do not fill the 8 GPUs"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(engines, tp, higher, node, message):
    with pytest.raises(ValueError, match=message):
        plan_pools(engines, tp, higher, node)


def test_heads_must_be_shared_evenly():
    shape = SHAPES["Qwen2.5-0.5B"]  # 14 attention heads, 2 KV heads
    require_divisible(shape, (1, 2, 14))
    with pytest.raises(ValueError, match="14 attention heads, which 4 does not divide"):
        require_divisible(shape, (2, 4))
    with pytest.raises(ValueError, match="2 KV heads, of which 7 is neither"):
        require_divisible(shape, (7,))


def test_engines_are_placed_on_gpus_of_all_nodes():
    _, specs = plan_pools(4, 1, (2,), 2)
    assert place_engines(specs) == {0: (0,), 1: (1,), 2: (2,), 3: (3,), 4: (0, 1), 5: (2, 3)}
    _, specs = plan_pools(2, 4, (), 8)
    assert place_engines(specs) == {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
