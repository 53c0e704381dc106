"""What a move is worth. Pure.

    SoonestEnd        the step ends sooner: nobody waits for anything but its last request
    FewestGpuSeconds  engines are sooner free for the next step, each for itself

A gain is looked at twice: for all of the step, and for what the moves touch alone. The first says
which is the best; the second, whether it pays, since of two pools that would end at the same time
neither could ever begin to be faster.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from engines.control.effects import Effect
from engines.control.state import StepState
from schemas.rollout import RequestId


class Worth(NamedTuple):
    """In seconds, or GPU-seconds. The more, the better."""

    whole: float
    """By which the step gets better."""
    own: float
    """By which what is touched gets better."""
    of: float
    """What is touched, left alone."""

    def pays(self, margin: float) -> bool:
        """`margin`: least gain, as a share of what it is of."""
        return self.own > margin * self.of


class Objective(Protocol):
    def worth(self, before: StepState, effect: Effect) -> Worth: ...

    def total(self, state: StepState) -> float:
        """What is to be small."""
        ...


class SoonestEnd:
    """The next step waits for the last request: `mode: sync`."""

    def worth(self, before: StepState, effect: Effect) -> Worth:
        touched, after = effect.requests, effect.after
        of_s = _last_s(before, touched)
        own_s = _last_s(after, touched)
        others_s = next((end_s for end_s, id in before.ranked if id not in touched), 0.0)
        return Worth(max(of_s, others_s) - max(own_s, others_s), of_s - own_s, of_s)

    def total(self, state: StepState) -> float:
        return state.end_s


class FewestGpuSeconds:
    """An engine that has nothing left begins the next step at once: `mode: pipelined`. So a switch
    that ties up the GPUs of a node must save time on all of them together."""

    def worth(self, before: StepState, effect: Effect) -> Worth:
        of = self._total(before, effect.engines)
        own = of - self._total(effect.after, effect.engines)
        return Worth(own, own, of)

    def total(self, state: StepState) -> float:
        return self._total(state, state.engines)

    def _total(self, state: StepState, engines: Iterable[int]) -> float:
        there = [state.engines[index] for index in engines if index in state.engines]
        return sum(e.tp_degree * state.engine_end_s(e.engine) for e in there)


def _last_s(state: StepState, requests: Iterable[RequestId]) -> float:
    """Of these; those that are there no more have ended."""
    return max((state.ends_s.get(id, 0.0) for id in requests), default=0.0)
