"""Proposes to reshape a pool when another layout would be faster (PAT, Algorithm 1). Pure.

    T_cur    end of the slowest engine, each with its own requests                   (line 4)
    TP'      for each higher layout: deal all requests anew over its engines         (line 7)
             T_rem + T_switch, again of the slowest engine                       (lines 8, 9)
    switch   to the layout with the least time, if that is below T_cur              (line 15)
             and switching at a later moment would be no better

The algorithm runs again after a switch, so a stage may have several switches. Before a stage there
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
- To move keys and values, the engines first save those that exist at the decision, while requests
  go on. Then the switch is made, and the forecast is for that moment.
- Requests are dealt anew when the switch is made: the longest context first, each to the engine
  with the fewest tokens. The paper says "merge and redistribute".
- A raced request counts once, with the copy that has the most tokens.
- The objective need not be the end of the step (`engines.control.objective`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from engines.control.effects import Effects, Switched, deal_anew, working
from engines.control.objective import Objective, SoonestEnd
from engines.control.proposal import Proposal
from engines.control.state import EngineForecast, EngineState, StepState
from engines.rollout.moves import Move, Reshape, RolloutView
from schemas.layout import Pool

LATER_SHARE = 0.03
"""Before a stage, a later switch must be better than no switch by this share."""
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
    """Missed savings by TP degree, in the objective's unit, never below 0."""

    def add(self, present: int, of_stage: Mapping[int, float]) -> None:
        """Add the savings of a stage that may begin in any layout. `of_stage`: the objective by TP
        degree."""
        for degree, total in of_stage.items():
            gain = of_stage[present] - total
            self.totals[degree] = max(0.0, self.totals.get(degree, 0.0) + gain)


@dataclass
class Reshaping:
    """The technique that proposes the best higher layout of each pool."""

    objective: Objective = field(default_factory=SoonestEnd)
    wait_shares: Sequence[float] = WAIT_SHARES
    """Later moments to compare with, as shares of the time until the pool's end."""
    missed_savings: MissedSavings = field(default_factory=MissedSavings)
    """Savings missed in earlier stages. The owner of the engines keeps them between stages."""

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        del view
        return [
            proposal
            for pool in effects.pools.values()
            if (sources := working(pool, state))
            for proposal in _PoolLook(self, pool, sources, state, effects).proposals()
        ]

    def note(self, proposal: Proposal) -> None:
        """Do nothing: there is nothing to remember."""

    def follow(self, view: RolloutView) -> Sequence[Move]:
        """Return no moves: nothing follows from a reshape."""
        del view
        return ()

    def opening(self, states: Sequence[StepState], effects: Effects) -> int | None:
        """Return the TP degree that all pools begin in, or None to keep it. A tie keeps it too.

        Requests have not begun. `states` are scenarios of their lengths; the objective is the mean
        over them. All pools get the same degree, because prompts are dealt evenly over engines. The
        slowest pool counts.
        """
        found = [of for state in states if (of := self._openings(state, effects))]
        if not found:
            return None
        totals = {degree: fmean(of[degree] for of in found) for degree in _common(found)}
        begun = [of for pool in effects.pools.values() if (of := working(pool, states[0]))]
        present = begun[0][0].tp_degree
        if present not in totals:
            return None
        self.missed_savings.add(present, totals)
        paid = [d for d in totals if self.missed_savings.totals[d] > self._change(d, effects)]
        best = min((present, *paid), key=lambda degree: totals[degree])
        if best != present:
            self.missed_savings.totals.clear()
        return None if all(of[0].tp_degree == best for of in begun) else best

    def _change(self, degree: int, effects: Effects) -> float:
        """Return the objective of changing a pool to this TP degree before a stage."""
        assert effects.costs
        num_engines = max(len(pool.engines.get(degree, ())) for pool in effects.pools.values())
        return self.objective.of_layout(degree, [effects.costs.control_s] * num_engines)

    def _openings(self, state: StepState, effects: Effects) -> dict[int, float]:
        """Return the objective by TP degree, the present degree first."""
        pools = [pool for pool in effects.pools.values() if working(pool, state)]
        by_pool = [self._pool_openings(pool, state, effects) for pool in pools]
        if not by_pool:
            return {}
        return {degree: max(of[degree] for of in by_pool) for degree in _common(by_pool)}

    def _pool_openings(self, pool: Pool, state: StepState, effects: Effects) -> dict[int, float]:
        present = working(pool, state)
        assert present
        totals = {present[0].tp_degree: self.least(pool, state, effects, LATER_SHARE)}
        knows = state.forecaster.knows
        if not all(map(knows, present)):
            return totals
        for degree in [degree for degree in pool.engines if degree not in totals]:
            dealt = deal_anew(present, pool.engines[degree], degree)
            if not all(map(knows, dealt)):
                continue
            begun = StepState.of(state.forecaster, state.rows, dealt)
            totals[degree] = self.least(pool, begun, effects, LATER_SHARE)
        return totals

    def least(
        self, pool: Pool, state: StepState, effects: Effects, later_share: float = 0.0
    ) -> float:
        """Return the objective of a working pool: the better of no switch and the best later
        switch. The later switch must be better by `later_share`, because the best of many forecasts
        is too optimistic."""
        sources = working(pool, state)
        assert sources
        look = _PoolLook(self, pool, sources, state, effects)
        stays, later = look.stays(), look.later()
        return min(stays, (1 + later_share) * later)


def _common(totals: Sequence[dict[int, float]]) -> list[int]:
    """Return the TP degrees that all have, in the order of the first."""
    return [degree for degree in totals[0] if all(degree in of for of in totals)]


@dataclass(frozen=True)
class _PoolLook:
    """A pool at one moment."""

    reshaping: Reshaping
    pool: Pool
    sources: Sequence[EngineState]
    state: StepState
    effects: Effects

    def proposals(self) -> Iterator[Proposal]:
        """Yield the best switch with known latencies, if now is the best moment for it."""
        for total, made in sorted(self._switched(), key=lambda at: at[0]):
            if total >= self.stays() or any(later < total for later in self._laters()):
                return
            if self._knows(*self.sources, *made.targets):
                move = Reshape(self.pool.index, made.targets[0].tp_degree, made.move_kv)
                yield Proposal("reshape", (move,))
                return

    def _knows(self, *engines: EngineState) -> bool:
        return all(map(self.state.forecaster.knows, engines))

    def stays(self) -> float:
        """Return the objective without a switch."""
        return self.reshaping.objective.of_layout(self.sources[0].tp_degree, self._ends_s())

    def later(self) -> float:
        """Return the best objective of a later switch, or infinity without one."""
        return min(self._laters(), default=math.inf)

    def _laters(self) -> Iterator[float]:
        """Yield the objective of each later switch."""
        end_s = max(self._ends_s())
        # Start with the latest: it has the fewest requests and is most often the better one.
        for share in reversed(self.reshaping.wait_shares):
            yield from (total for total, _ in self._switched(share * end_s))

    def _ends_s(self) -> list[float]:
        return [self.state.engine_end_s(source.engine) for source in self.sources]

    def _switched(self, wait_s: float = 0.0) -> Iterator[tuple[float, Switched]]:
        """Yield the objective and result of each switch to a higher TP degree, `wait_s` from now.
        If free engines start the next step, every engine that has requests now must still have some
        then."""
        objective, forecast = self.reshaping.objective, self.state.forecaster.forecast
        present, found = self.sources[0].tp_degree, self.effects.switches
        for degree in [degree for degree in self.pool.engines if degree > present]:
            for made in found(self._forecasts, self.pool, degree, wait_s):
                if not (objective.idles or self._all_there(made)):
                    continue
                ends_s = [made.ready_s + forecast(target).end_s for target in made.targets]
                yield objective.of_layout(degree, ends_s), made

    @cached_property
    def _forecasts(self) -> list[EngineForecast]:
        return [self.state.forecast(source) for source in self.sources]

    def _all_there(self, made: Switched) -> bool:
        both = zip(self.sources, made.sources, strict=True)
        return all(then.copies or not now.copies for now, then in both)
