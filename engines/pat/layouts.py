"""Engines of several TP degrees on the same GPUs: which there are, and where their ranks are. Pure.

TP 2 to 4 to 8 on the 8 GPUs of a node; a row is an engine, its GPUs by rank:

    TP 2   0 1    2 3    4 5    6 7         engines 0 .. 3, the base
    TP 4   0 2 1 3       4 6 5 7            engines 4, 5
    TP 8   0 4 2 6 1 5 3 7                  engine  6

Rank R of an engine that merges d engines is rank R // d of the (R mod d)-th of them: shard R of
d t lies inside shard R // d of t, since R // d / t <= R / (d t) < (R // d + 1) / t. So each GPU
needs only rows that it had in the layout before, and that it had at the base.

Deviation: PAT keeps the order of the GPUs and sends every shard to its rank (4.3, Efficient weight
resharding), as its ranks are fixed. Here engines of each layout are processes of their own, whose
ranks can be in any order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count, islice

from engines.latency.model_shape import ModelShape
from schemas.layout import Pool


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """A rollout engine and its place."""

    engine: int
    tp_degree: int
    pool: int | None = None
    """Its node's; None: it is in none."""
    devices: tuple[int, ...] = ()
    """GPUs of its node, by rank; none: those that it is given."""
    standby: bool = False
    """It begins parked."""


def plan_pools(
    num_engines: int, tp_degree: int, higher_tp_degrees: Sequence[int], gpus_per_node: int
) -> tuple[tuple[Pool, ...], tuple[EngineSpec, ...]]:
    """A pool for each node, and all engines by index: those of the base, then the others.

    Engines of the base are dealt to nodes in order. Where there is less than a node, the pool is
    what there is. Without higher degrees there is no pool, and GPUs are left to whoever gives them.
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
    """GPUs of each engine, numbered over all nodes; engines of several layouts share theirs."""
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
    """GPUs of each engine by rank, by TP degree. Each degree is a multiple of the one before."""
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
    """GPUs by rank of the engine that takes over those of these: all first ranks, all second."""
    return tuple(chain.from_iterable(zip(*engines, strict=True)))


def require_divisible(shape: ModelShape, tp_degrees: Sequence[int]) -> None:
    """Refuse TP degrees among which the model's heads cannot be shared."""
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
