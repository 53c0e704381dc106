"""The rule by which a pool changes its layout (PAT, Algorithm 1). Pure.

    T_cur    end of the slowest engine, each with its own requests                   (line 4)
    TP'      for each higher layout: deal all requests anew over its engines         (line 7)
             T_rem + T_switch, again of the slowest engine                       (lines 8, 9)
    switch   to the layout with the least time, if that is below T_cur              (line 15)
             and switching at a later moment would be no better

The rule is asked again after a switch, so a stage may have several switches. Before a stage there
are no keys and values to move, so any layout is considered, lower ones too. The stage begins in the
layout with the earliest predicted end, once the savings missed so far exceed the cost of the
change (`MissedSavings`).

Deviations:
- The paper compares a switch now with no switch. This is enough if all responses are expected to
  reach the same length: then a higher TP degree pays only once it decodes the present batch faster.
  With a forecast of the tail, a switch pays at any time before it, and the rule would switch at the
  start. So a switch now is also compared with later switches (`wait_shares`; empty for the paper's
  rule).
- Each response has its own estimated length (`engines.pat.remaining`). The paper uses `Maximum`.
- A stage may begin in any layout. In the paper, people tune the first layout by hand.
- During a stage only higher TP degrees are considered. A shrinking batch has no use for a lower
  one, though with `Maximum` lengths it may look so again and again.
- A pool never leaves or enters a layout if part of its forecast lies outside the measured latencies
  (`Forecaster.knows`).
- Requests are dealt anew when the switch is made: the longest context first, each to the engine
  with the fewest tokens. The paper says "merge and redistribute".
- If free engines begin the next step at once (not `idles`), GPU seconds count, not the last end.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from refrain.engines.control.state import EngineForecast, EngineState, StepState
from refrain.engines.control.switches import Switched, deal_anew, switched, switches, working
from refrain.engines.pat.costs import SwitchCosts
from refrain.schemas.layout import Pool

LATER_SHARE = 0.03
"""Before a stage, a later switch must be better than no switch by this share: the best of many
forecasts is too optimistic."""
WAIT_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)


@dataclass
class MissedSavings:
    """Savings that each other layout would have brought, summed over the past stages.

    Stages differ. Following each stage's forecast would pay for changes back and forth. A change
    that pays a little in every stage would never be made if it had to pay for itself in one. So
    change a layout once the missed savings exceed the cost of the change: whatever comes next, the
    change has then cost no more than waiting did.
    """

    totals: dict[int, float] = field(default_factory=dict)
    """Missed savings by TP degree, in the unit of `Reshaping.value`, never below 0."""

    def add(self, present: int, of_stage: Mapping[int, float]) -> None:
        """Add the savings of a stage that may begin in any layout. `of_stage`: value by TP
        degree."""
        for degree, value in of_stage.items():
            gain = of_stage[present] - value
            self.totals[degree] = max(0.0, self.totals.get(degree, 0.0) + gain)


@dataclass
class Reshaping:
    """The rule for all pools of a run."""

    costs: SwitchCosts
    pools: Mapping[int, Pool]
    """Pools by index."""
    idles: bool = True
    """Whether an engine without requests stays free until the step ends."""
    wait_shares: Sequence[float] = WAIT_SHARES
    """Later moments to compare with, as shares of the time until the pool's end."""
    missed_savings: MissedSavings = field(default_factory=MissedSavings)
    """Savings missed in earlier stages. The owner of the engines keeps them between stages."""

    def value(self, tp_degree: int, ends_s: Sequence[float]) -> float:
        """Return what a layout should minimize: seconds until its last engine has no requests, or
        GPU seconds of all engines. `ends_s`: when each runs out of requests."""
        return max(ends_s) if self.idles else tp_degree * sum(ends_s)

    def look(self, pool: Pool, state: StepState) -> "PoolLook | None":
        """Return the pool as it is in this state, or None if it has no working layout."""
        sources = working(pool, state)
        return PoolLook(self, pool, sources, state) if sources else None

    def opening(self, states: Sequence[StepState]) -> int | None:
        """Return the TP degree that all pools begin in, or None to keep it. A tie keeps it too.

        Requests have not begun. `states` are scenarios of their lengths; their mean value counts.
        All pools get the same degree, because prompts are dealt evenly over engines. The slowest
        pool counts.
        """
        found = [of for state in states if (of := self.openings(state))]
        if not found:
            return None
        values = {degree: fmean(of[degree] for of in found) for degree in _common(found)}
        begun = [of[0].tp_degree for p in self.pools.values() if (of := working(p, states[0]))]
        if begun[0] not in values:
            return None
        self.missed_savings.add(begun[0], values)
        paid = [d for d in values if self.missed_savings.totals[d] > self._change(d)]
        best = min((begun[0], *paid), key=values.__getitem__)
        if best != begun[0]:
            self.missed_savings.totals.clear()
        return None if all(degree == best for degree in begun) else best

    def _change(self, degree: int) -> float:
        """Return the value of changing a pool to this TP degree before a stage."""
        num_engines = max(len(pool.engines.get(degree, ())) for pool in self.pools.values())
        return self.value(degree, [self.costs.control_s] * num_engines)

    def openings(self, state: StepState) -> dict[int, float]:
        """Return the value by TP degree, the present degree first."""
        looks = [look for pool in self.pools.values() if (look := self.look(pool, state))]
        by_pool = [look.openings() for look in looks]
        return {d: max(of[d] for of in by_pool) for d in _common(by_pool)} if by_pool else {}


def _common(values: Sequence[dict[int, float]]) -> list[int]:
    """Return the TP degrees that all have, in the order of the first."""
    return [degree for degree in values[0] if all(degree in of for of in values)]


@dataclass(frozen=True)
class PoolLook:
    """A pool at one moment, in one scenario of the lengths."""

    reshaping: Reshaping
    pool: Pool
    sources: Sequence[EngineState]
    state: StepState

    def best(self) -> list[tuple[float, Switched]]:
        """Return the value of the best switch with known latencies, and the switch. Empty if it
        does not pay, or a later one is better."""
        for value, made in sorted(self._switched(), key=lambda at: at[0]):
            if value >= self.stays or any(later < value for later in self._laters()):
                return []
            if self._knows(*self.sources, *made.targets):
                return [(value, made)]
        return []

    def gain(self, tp_degree: int, *, move_kv: bool) -> float:
        """Return how much less the value is with this switch. 0 if no request would be left."""
        made = switched(self.reshaping.costs, self._forecasts, self.pool, tp_degree, move_kv)
        return self.stays - self._value(made) if made else 0.0

    def openings(self) -> dict[int, float]:
        """Return the value of beginning in each layout, the present one first."""
        values = {self.sources[0].tp_degree: self._least()}
        if not self._knows(*self.sources):
            return values
        for degree in [degree for degree in self.pool.engines if degree not in values]:
            dealt = deal_anew(self.sources, self.pool.engines[degree], degree)
            if self._knows(*dealt):
                begun = self.reshaping.look(self.pool, StepState.of(self.state.forecaster, dealt))
                assert begun
                values[degree] = begun._least()
        return values

    def _least(self) -> float:
        """Return the value of no switch, or of the best later one if that is better."""
        return min(self.stays, (1 + LATER_SHARE) * min(self._laters(), default=math.inf))

    def _knows(self, *engines: EngineState) -> bool:
        return all(map(self.state.forecaster.knows, engines))

    @cached_property
    def ends_s(self) -> list[float]:
        return [self.state.engine_end_s(source.engine) for source in self.sources]

    @cached_property
    def stays(self) -> float:
        """Value without a switch."""
        return self.reshaping.value(self.sources[0].tp_degree, self.ends_s)

    def _laters(self) -> Iterator[float]:
        """Yield the value of each later switch."""
        # Start with the latest: it has the fewest requests and is most often the better one.
        for share in reversed(self.reshaping.wait_shares):
            yield from (value for value, _ in self._switched(share * max(self.ends_s)))

    def _switched(self, wait_s: float = 0.0) -> Iterator[tuple[float, Switched]]:
        """Yield the value and result of each switch to a higher TP degree, `wait_s` from now."""
        costs, present = self.reshaping.costs, self.sources[0].tp_degree
        for degree in [degree for degree in self.pool.engines if degree > present]:
            for made in switches(costs, self._forecasts, self.pool, degree, wait_s):
                if self.reshaping.idles or self._all_there(made):
                    yield self._value(made), made

    def _value(self, made: Switched) -> float:
        forecast = self.state.forecaster.forecast
        ends_s = [made.ready_s + forecast(target).end_s for target in made.targets]
        return self.reshaping.value(made.tp_degree, ends_s)

    @cached_property
    def _forecasts(self) -> list[EngineForecast]:
        return [self.state.forecasts[source.engine] for source in self.sources]

    def _all_there(self, made: Switched) -> bool:
        """Whether every engine that has requests now still has some then. If free engines start the
        next step, a later switch is impossible otherwise."""
        both = zip(self.sources, made.sources, strict=True)
        return all(then.copies or not now.copies for now, then in both)
