"""Nodes for all that wants GPUs, before anything is started. Pure.

    1.  engines, pools, drafters    on one node each, the largest first, where they leave least
                                    room; drafters among those, beside the engines that they feed
    2.  trainer                     in turn with the engines on the first of their GPUs, or on as
                                    few of the nodes that are left as possible

Ranks that came to any free GPU would leave no node whole for an engine of eight.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Wanted:
    """GPUs that one part of a run wants."""

    what: str
    num_gpus: int
    setting: str
    """Settings that say so."""
    spreads: bool = False
    """Whether they may be of several nodes."""
    beside: tuple[str, ...] = ()
    """Parts that it is fed by, or feeds."""
    within: tuple[str, ...] = ()
    """Parts whose GPUs it has in turn with them, and no others."""


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """Owners of the GPUs of a cluster."""

    num_gpus: int = 0
    """GPUs of the cluster; 0: everything runs on CPUs."""
    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Node of each GPU of a part."""

    def node(self, what: str) -> str | None:
        """Node of a part that is on one; None: any."""
        return next(iter(self.nodes.get(what, ())), None)


def place(wanted: Sequence[Wanted], free: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Node of each GPU of each part. `free`: GPUs by node.

    Raises ValueError with the arithmetic when there is no room.
    """
    left, placed = Counter(free), {}
    for one in sorted(wanted, key=lambda one: (one.spreads, -one.num_gpus)):
        if one.within:
            placed[one.what] = _in_turn(one, placed)
            continue
        nodes = _spread(one, left) if one.spreads else _together(one, left, placed)
        if len(nodes) < one.num_gpus:
            raise ValueError(_no_room(one, wanted, free, left))
        placed[one.what] = nodes
        left.subtract(nodes)
    return placed


def _in_turn(one: Wanted, placed: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    theirs = [node for what in one.within for node in placed[what]]
    if len(theirs) < one.num_gpus:
        raise ValueError(
            f"{one.what} wants {one.num_gpus} GPUs ({one.setting}) in turn with the rollout "
            f"engines, which have {len(theirs)}: lower it, have engines take as many GPUs "
            "(rollout.num_engines x rollout.tp_degree), or set placement=split"
        )
    return tuple(theirs[: one.num_gpus])


def _together(
    one: Wanted, left: Counter[str], placed: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    near = Counter(node for what in one.beside for node in placed.get(what, ())[:1])
    roomy = [node for node, num in left.items() if num >= one.num_gpus]
    node = min(roomy, key=lambda node: (-near[node], left[node]), default="")
    return (node,) * one.num_gpus if node else ()


def _spread(one: Wanted, left: Counter[str]) -> tuple[str, ...]:
    nodes: list[str] = []
    rest = dict(left)
    while rest and len(nodes) < one.num_gpus:
        missing = one.num_gpus - len(nodes)
        enough = [node for node, num in rest.items() if num >= missing]
        node = min(enough, key=rest.__getitem__) if enough else max(rest, key=rest.__getitem__)
        nodes += [node] * min(missing, rest.pop(node))
    return tuple(nodes)


def _no_room(
    one: Wanted, wanted: Sequence[Wanted], free: Mapping[str, int], left: Counter[str]
) -> str:
    sums = Counter[str]()
    for part in wanted:
        sums[part.setting] += 0 if part.within else part.num_gpus
    summed = ", ".join(f"{num} for {setting}" for setting, num in sums.items() if num)
    where = "GPUs" if one.spreads else "GPUs of one node"
    taken = f"; {_listed(left)} of them when {one.what} is placed" if left != free else ""
    return (
        f"{one.what} wants {one.num_gpus} {where}, and there is no room: the run takes "
        f"{sums.total()} GPUs ({summed}), free are {_listed(free)} by node{taken}. Lower these "
        "settings, or add nodes"
    )


def _listed(free: Mapping[str, int]) -> str:
    return ", ".join(map(str, sorted(free.values(), reverse=True))) or "none"
