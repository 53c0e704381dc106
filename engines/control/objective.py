"""Gains of moves, by what is to be reached. Pure.

    SoonestEnd        the step ends sooner: nobody waits for anything but its last request
    FewestGpuSeconds  engines are sooner free for the next step, each for itself

A gain is looked at twice: for all of the step, and for what the moves touch alone. The first says
which is the best; the second, whether it pays, since of two pools that would end at the same time
neither could ever begin to be faster.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engines.control.effects import Effect
from engines.control.state import EngineState, StepState


class Gain(NamedTuple):
    """Seconds, or GPU-seconds, that moves save."""

    whole: float
    """Gain of the whole step."""
    own: float
    """Gain of what is touched."""
    alone: float
    """Total of what is touched, left alone."""

    def pays(self, margin: float) -> bool:
        """`margin`: least gain, as a share of that."""
        return self.own > margin * self.alone


class SoonestEnd:
    """The next step waits for the last request: `mode: sync`."""

    idles = True
    """An engine that has nothing left stays free until the step ends."""

    def gain(self, before: StepState, effect: Effect) -> Gain:
        of_s = max((before.ends_s[row] for row in effect.requests), default=0.0)
        own_s = max(effect.ends_s.values(), default=0.0)
        others = (end_s for end_s, row in before.ranked if row not in effect.requests)
        others_s = next(others, 0.0)
        return Gain(max(of_s, others_s) - max(own_s, others_s), of_s - own_s, of_s)

    def total(self, state: StepState) -> float:
        """The quantity that is to be small."""
        return state.end_s

    def of_layout(self, tp_degree: int, ends_s: Sequence[float]) -> float:
        """The same of some engines alone, by when each has nothing left."""
        del tp_degree
        return max(ends_s)


class FewestGpuSeconds:
    """An engine that has nothing left begins the next step at once: `mode: pipelined`. So a switch
    that ties up the GPUs of a node must save time on all of them together."""

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
    """GPU time until the engine has nothing left: losers of a race leave with the winner."""
    last_s = max((ends_s[copy.row] for copy in engine.copies), default=0.0)
    return engine.tp_degree * last_s
