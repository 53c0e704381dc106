"""Plans engines of several TP degrees on the same GPUs, and the GPU of each rank. Pure.

TP 2 to 4 to 8 on the 8 GPUs of a node; a row is an engine, its GPUs by rank:

    TP 2   0 1    2 3    4 5    6 7         engines 0 .. 3, the base
    TP 4   0 2 1 3       4 6 5 7            engines 4, 5
    TP 8   0 4 2 6 1 5 3 7                  engine  6

Suppose an engine merges d engines of TP degree t. Its rank R runs on the GPU of rank R // d of
engine R mod d. Shard R of d t lies inside shard R // d of t, since R // d / t <= R / (d t) <
(R // d + 1) / t. So each GPU needs only rows that it had in the layout before, and in the base.

Deviation: PAT keeps the order of the GPUs and sends every shard to its rank (4.3, Efficient weight
resharding), because its ranks are fixed. Here each layout has its own processes, so ranks can be in
any order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count, islice

from refrain.engines.latency.model_shape import ModelShape
from refrain.schemas.layout import Pool


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """A rollout engine and its GPUs."""

    engine: int
    tp_degree: int
    pool: int | None = None
    """Pool (node) of the engine. None: no pool."""
    devices: tuple[int, ...] = ()
    """GPUs of the node, by rank. Empty: whichever GPUs the engine is given."""
    standby: bool = False
    """Whether the engine starts parked."""


def plan_pools(
    num_engines: int, tp_degree: int, higher_tp_degrees: Sequence[int], gpus_per_node: int
) -> tuple[tuple[Pool, ...], tuple[EngineSpec, ...]]:
    """Return a pool for each node, and all engines by index: the base first, then the others.

    Engines of the base are dealt to nodes in order. With fewer GPUs than a node has, there is one
    pool of these GPUs. Without higher degrees there is no pool, and engines have no fixed GPUs.
    """
    if not higher_tp_degrees:
        return (), tuple(EngineSpec(engine, tp_degree) for engine in range(num_engines))
    num_gpus = num_engines * tp_degree
    node_gpus = min(gpus_per_node, num_gpus)
    _require_degrees(tp_degree, higher_tp_degrees, num_gpus, node_gpus)
    layouts = plan_layouts(node_gpus, (tp_degree, *higher_tp_degrees))
    base, standby = count(), count(num_engines)
    indices = {degree: base if degree == tp_degree else standby for degree in layouts}
    pools = tuple(
        Pool(
            node,
            {degree: tuple(islice(indices[degree], len(of))) for degree, of in layouts.items()},
        )
        for node in range(num_gpus // node_gpus)
    )
    specs = [
        EngineSpec(engine, degree, pool.index, devices, standby=degree != pool.base)
        for pool in pools
        for degree, engines in pool.engines.items()
        for engine, devices in zip(engines, layouts[degree], strict=True)
    ]
    return pools, tuple(sorted(specs, key=lambda spec: spec.engine))


def place_engines(specs: Sequence[EngineSpec]) -> dict[int, tuple[int, ...]]:
    """Return each engine's GPUs, numbered over all nodes. Engines of several layouts share GPUs."""
    node_gpus = 1 + max((gpu for spec in specs for gpu in spec.devices), default=0)
    return {
        spec.engine: tuple(sorted(spec.pool * node_gpus + gpu for gpu in spec.devices))
        if spec.pool is not None
        else tuple(range(spec.engine * spec.tp_degree, (spec.engine + 1) * spec.tp_degree))
        for spec in specs
    }


def plan_layouts(
    num_gpus: int, tp_degrees: Sequence[int]
) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Return the GPUs by rank of each engine, by TP degree. Each degree is a multiple of the one
    before."""
    lowest = tp_degrees[0]
    engines = [tuple(range(gpu, gpu + lowest)) for gpu in range(0, num_gpus, lowest)]
    layouts = {lowest: tuple(engines)}
    for degree in tp_degrees[1:]:
        merged = degree // len(engines[0])
        engines = [
            merge_devices(engines[first : first + merged])
            for first in range(0, len(engines), merged)
        ]
        layouts[degree] = tuple(engines)
    return layouts


def merge_devices(engines: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the merged engine's GPUs by rank: all first ranks, all second ranks, and so on."""
    return tuple(chain.from_iterable(zip(*engines, strict=True)))


def require_divisible(shape: ModelShape, tp_degrees: Sequence[int]) -> None:
    """Raise ValueError for a TP degree that the model's heads cannot be divided by."""
    for degree in tp_degrees:
        if shape.num_heads % degree:
            raise ValueError(
                f"pat.tp_degrees: {shape.name} has {shape.num_heads} attention heads, which "
                f"{degree} does not divide; leave {degree} out"
            )
        if shape.num_kv_heads % degree and degree % shape.num_kv_heads:
            raise ValueError(
                f"pat.tp_degrees: {shape.name} has {shape.num_kv_heads} KV heads, of which "
                f"{degree} is neither a divisor nor a multiple; leave {degree} out"
            )


def _require_degrees(
    tp_degree: int, higher_tp_degrees: Sequence[int], num_gpus: int, node_gpus: int
) -> None:
    before = tp_degree
    for degree in higher_tp_degrees:
        if degree <= before or degree % before:
            raise ValueError(
                f"pat.tp_degrees: {degree} is not a multiple of {before}, the TP degree before "
                "it: name them in ascending order, each a multiple of the one before and all of "
                f"rollout.tp_degree ({tp_degree})"
            )
        before = degree
    if num_gpus % node_gpus:
        raise ValueError(
            f"pat.gpus_per_node: {num_gpus} GPUs (rollout.num_engines x rollout.tp_degree) are "
            f"not a whole number of nodes of {node_gpus}; change rollout.num_engines or "
            "pat.gpus_per_node"
        )
    for degree in (tp_degree, *higher_tp_degrees):
        if node_gpus % degree:
            raise ValueError(
                f"pat.tp_degrees: engines of TP degree {degree} do not fill the {node_gpus} GPUs "
                "of a node; choose degrees that divide it, or change rollout.num_engines or "
                "pat.gpus_per_node"
            )
