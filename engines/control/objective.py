"""The gain of moves, for two objectives. Pure.

    SoonestEnd        make the step end sooner: the next step waits for the last request
    FewestGpuSeconds  free the engines sooner: each begins the next step when it is free

Each gain is computed twice: for the whole step, and for the touched requests alone. The gain of the
whole step tells which proposal is the best. The gain of the touched requests tells whether it pays:
of two pools that end at the same time, neither could speed up first if only the whole step counted.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engines.control.effects import Effect
from engines.control.state import EngineState, StepState


class Gain(NamedTuple):
    """Seconds (or GPU-seconds) that moves save."""

    whole: float
    """Gain of the whole step."""
    own: float
    """Gain of the touched requests or engines."""
    alone: float
    """Total of the touched requests or engines, without the moves."""

    def pays(self, margin: float) -> bool:
        """Return whether `own` exceeds this share of `alone`."""
        return self.own > margin * self.alone


class SoonestEnd:
    """The objective of `mode: sync`: minimize the time until the last request ends."""

    idles = True
    """Whether an engine without requests stays free until the step ends."""

    def gain(self, before: StepState, effect: Effect) -> Gain:
        of_s = max((before.ends_s[row] for row in effect.requests), default=0.0)
        own_s = max(effect.ends_s.values(), default=0.0)
        others = (end_s for end_s, row in before.ranked if row not in effect.requests)
        others_s = next(others, 0.0)
        return Gain(max(of_s, others_s) - max(own_s, others_s), of_s - own_s, of_s)

    def total(self, state: StepState) -> float:
        """Return the quantity to minimize."""
        return state.end_s

    def of_layout(self, tp_degree: int, ends_s: Sequence[float]) -> float:
        """Return the same quantity for some engines. `ends_s`: when each runs out of requests."""
        del tp_degree
        return max(ends_s)


class FewestGpuSeconds:
    """The objective of `mode: pipelined`: minimize the engines' GPU time. A free engine begins the
    next step at once, so a switch that occupies a node's GPUs must save time over all of them."""

    idles = False

    def gain(self, before: StepState, effect: Effect) -> Gain:
        there = [index for index in effect.engines if index in before.engines]
        of = sum(_gpu_s(before.engines[i], before.ends_s) for i in there)
        kept = [before.engines[i] for i in there if i not in effect.changes]
        new = [engine for engine in effect.changes.values() if engine]
        ends_s = ChainMap(effect.ends_s, before.ends_s)
        own = of - sum(_gpu_s(engine, ends_s) for engine in (*kept, *new))
        return Gain(own, own, of)

    def total(self, state: StepState) -> float:
        return sum(_gpu_s(engine, state.ends_s) for engine in state.engines.values())

    def of_layout(self, tp_degree: int, ends_s: Sequence[float]) -> float:
        return tp_degree * sum(ends_s)


Objective = SoonestEnd | FewestGpuSeconds


def _gpu_s(engine: EngineState, ends_s: Mapping[int, float]) -> float:
    """Return the GPU time until the engine runs out of requests. A race's losers stop with its
    winner."""
    last_s = max((ends_s[copy.row] for copy in engine.copies), default=0.0)
    return engine.tp_degree * last_s
