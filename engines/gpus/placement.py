"""Places every part of a run that needs GPUs on nodes, before anything starts. Pure.

    1.  engines, pools, drafters    each on one node, the largest first, on the node that has least
                                    room left; drafters on the node of engines that they feed
    2.  trainer                     in turn with the engines, on the first of their GPUs; or on as
                                    few of the remaining nodes as possible

If ranks took any free GPUs, no node would stay whole for an engine with eight GPUs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Wanted:
    """GPUs that one part of a run needs."""

    what: str
    num_gpus: int
    setting: str
    """Settings that ask for them."""
    spreads: bool = False
    """Whether the GPUs may be on several nodes."""
    beside: tuple[str, ...] = ()
    """Parts that it feeds, or that feed it."""
    within: tuple[str, ...] = ()
    """Parts whose GPUs it shares in turn. It has no others."""


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """Which part owns which of a cluster's GPUs."""

    num_gpus: int = 0
    """GPUs of the cluster. 0: everything runs on CPUs."""
    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Node of each GPU, by part."""

    def node(self, what: str) -> str | None:
        """Return the node of a part that has one, or None for any node."""
        return next(iter(self.nodes.get(what, ())), None)


def place(wanted: Sequence[Wanted], free: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Return the node of each GPU of each part. `free`: free GPUs by node.

    Raise ValueError with the arithmetic if there is no room.
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
